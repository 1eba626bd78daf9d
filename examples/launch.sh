#!/usr/bin/env bash
# Start a script on all GPUs of this node, or of several: launch.sh SCRIPT FLAGS...
#
#   GPUS_PER_NODE=4 bash examples/launch.sh pretrain_gpt.py ...                              one node (default: 8 GPUs)
#   NODES=2 NODE_RANK=0 MASTER_ADDR=host bash examples/launch.sh pretrain_gpt.py ...         on each of two nodes
#   LAUNCH=srun bash examples/launch.sh pretrain_gpt.py ...                                  on all nodes of a Slurm job
#   bash examples/launch.sh pretrain_gpt.py ... --dry-run                                    check only, files too; needs no GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
gpus=${GPUS_PER_NODE:-8} nodes=${NODES:-1}

for argument in "$@"; do
    if [ "$argument" = --dry-run ]; then
        exec "$python" "$@" --world-size $((nodes * gpus)) --ranks-per-node "$gpus"
    fi
    if [ "$argument" = --exit-signal-handler ]; then # torchrun kills ranks that take longer to save, by default 30 s
        export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    fi
done

if [ "${LAUNCH:-torchrun}" = srun ]; then # one task a GPU; ranks find each other from Slurm's own variables
    # Ranks end each other, so that srun's exit code is theirs; those that are stuck are killed after a minute.
    exec srun --kill-on-bad-exit=0 --wait=60 "$python" "$@"
fi
if [ "$nodes" -eq 1 ]; then
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$@"
fi
exec "$python" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$gpus" --node-rank "${NODE_RANK:?number of this node, from 0}" \
    --master-addr "${MASTER_ADDR:?host name of node 0}" --master-port "${MASTER_PORT:-29500}" "$@"
