#!/usr/bin/env bash
# Start a script on all GPUs of this node, or of several: launch.sh SCRIPT FLAGS...
#
#   GPUS_PER_NODE=4 bash examples/launch.sh pretrain_gpt.py ...                              one node (default: 8 GPUs)
#   NODES=2 NODE_RANK=0 MASTER_ADDR=host bash examples/launch.sh pretrain_gpt.py ...         on each of two nodes
#   LAUNCH=srun bash examples/launch.sh pretrain_gpt.py ...                                  on all nodes of a Slurm job
#   bash examples/launch.sh pretrain_gpt.py ... --dry-run                                    check only, files too; needs no GPU
#   bash examples/launch.sh pretrain_gpt.py ... --dry-run --launch-file FILE                 and compare with a cluster's file
#
# Kubeflow's variables PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT say the same.
# HEALTH_FILE=/tmp/health.json adds --health-file. CONTAINER_IMAGE and CONTAINER_MOUNTS are for srun with pyxis.
# See docs/launch.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
gpus=${GPUS_PER_NODE:-${PET_NPROC_PER_NODE:-8}} nodes=${NODES:-${PET_NNODES:-1}}

added=() ranks=(--world-size "${RANKS:-$((nodes * gpus))}" --ranks-per-node "$gpus") dry_run=''
if [ -n "${HEALTH_FILE:-}" ]; then added=(--health-file "$HEALTH_FILE"); fi
for argument in "$@"; do
    case $argument in
        --dry-run) dry_run=yes ;;
        --health-file | --health-file=*) added=() ;;
        --launch-file | --launch-file=*) # which says how many, unless variables do
            if [ -z "${NODES:-}${PET_NNODES:-}${GPUS_PER_NODE:-}${PET_NPROC_PER_NODE:-}" ]; then ranks=(); fi ;;
        --exit-signal-handler) # torchrun kills ranks that take longer to save, by default 30 s
            export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600} ;;
    esac
done

container=()
if [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${CONTAINER_IMAGE:-}" ]; then # with its checkout; srun of pyxis starts it
    container=(--container-image "$CONTAINER_IMAGE" --container-workdir "${CONTAINER_WORKDIR:-/megatron}")
    if [ -n "${CONTAINER_MOUNTS:-}" ]; then container+=(--container-mounts "$CONTAINER_MOUNTS"); fi
    python=python3
fi
if [ -n "$dry_run" ]; then
    start=()
    if [ ${#container[@]} -gt 0 ]; then start=(srun --nodes 1 --ntasks 1 "${container[@]}"); fi
    exec ${start[@]+"${start[@]}"} "$python" "$@" ${added[@]+"${added[@]}"} ${ranks[@]+"${ranks[@]}"}
fi
set -- "$@" ${added[@]+"${added[@]}"}

if [ "${LAUNCH:-torchrun}" = srun ]; then # one task a GPU; ranks find each other from Slurm's own variables
    if [ -n "${SLURM_HET_SIZE:-}" ]; then container+=("--het-group=0-$((SLURM_HET_SIZE - 1))"); fi # one step on all
    # Ranks end each other, so that srun's exit code is theirs; those that are stuck are killed after a minute.
    exec srun --kill-on-bad-exit=0 --wait=60 ${container[@]+"${container[@]}"} "$python" "$@"
fi
if [ "$nodes" -eq 1 ]; then
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"
fi
node=${NODE_RANK:-${PET_NODE_RANK:-}} address=${MASTER_ADDR:-${PET_MASTER_ADDR:-}}
exec "$python" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "${node:?number of this node, from 0: set NODE_RANK}" \
    --master-addr "${address:?host name of node 0: set MASTER_ADDR}" \
    --master-port "${MASTER_PORT:-${PET_MASTER_PORT:-29500}}" "$@"
