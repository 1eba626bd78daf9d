"""Files that start a run on a cluster: what they say, and what they and the settings say differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.planning.estimate import MemoryEstimate
from megatron.planning.launch.disagreements import described, disagreements
from megatron.planning.launch.launch_file import GIB
from megatron.planning.launch.read import read_launch_file
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_sentence, expect_error

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
JOB, PYTORCH_JOB, TRAIN_JOB = (f"kubernetes/{name}.yaml" for name in ("job", "pytorchjob", "trainjob"))
SLURM, SKYPILOT = "slurm/train_gpt.sbatch", "skypilot/train_llama3_8b.yaml"
FILES = (JOB, PYTORCH_JOB, TRAIN_JOB, SLURM, SKYPILOT)
FLAGS = (
    "--data-path /data/fineweb_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/llama3 "
    "--save /runs/llama3_8b --load /runs/llama3_8b --exit-signal-handler --health-file /tmp/health.json "
    "--global-batch-size 64 --num-workers 2"
)
REQUESTS, LIMITS = 'requests: {cpu: "64", memory: 1Ti}', "limits: {nvidia.com/gpu: 8, memory: 1Ti}"
SMALL = MemoryEstimate(weights=GIB, gradients=GIB, main_params=GIB, moments=GIB, kept=GIB, working=GIB)
LARGE = MemoryEstimate(weights=60 * GIB, gradients=60 * GIB, main_params=GIB, moments=GIB, kept=GIB, working=GIB)
SLOW = MemoryEstimate(weights=99 * GIB, gradients=0, main_params=20 * GIB, moments=20 * GIB, kept=0, working=0)
COPIED = MemoryEstimate(weights=6 * GIB, gradients=0, main_params=0, moments=0, kept=0, working=0)
OFFLOADED = MemoryEstimate(weights=GIB, gradients=GIB, main_params=0, moments=0, kept=0, working=0, offloaded=200 * GIB)


def found(
    example: str,
    folder: Path,
    *,
    old: str = "",
    new: str = "",
    flags: str = "",
    ranks: int = 32,
    memory: MemoryEstimate = SMALL,
    without: str = "",
) -> list[str]:
    """What an example with one change, and tiny settings ``without`` a part of ``FLAGS``, say differently."""
    assert without in FLAGS
    text = (EXAMPLES / example).read_text(encoding="utf-8")
    assert old in text
    path = folder / Path(example).name
    path.write_text(new.join(text.rsplit(old, 1)) if old else text)  # what the last container, the one that trains, has
    save = " --save s3://megatron-runs/llama3_8b --load s3://megatron-runs/llama3_8b" if example == SKYPILOT else ""
    return disagreements(
        tiny_config(f"{FLAGS.replace(without, '')}{save} {flags}", ranks=ranks), read_launch_file(str(path)), memory
    )


@pytest.mark.parametrize("example", FILES)
def test_examples_agree_with_the_settings_that_they_start(example: str, tmp_path: Path) -> None:
    """Whoever copies one and changes nothing gets a run that starts, saves in time, and is seen."""
    assert found(example, tmp_path) == []
    file = read_launch_file(str(EXAMPLES / example))
    assert file.world_size == 32
    assert "4 x 8 ranks" in described(tiny_config(FLAGS, ranks=32), file)


KINDS: dict[str, tuple[Any, ...]] = {
    "ranks of the settings": (JOB, "", "", {"ranks": 16}, "32", "16"),
    "nodes in two places": (JOB, "completions: 4", "completions: 2", {"ranks": 16}, "completions", "parallelism"),
    "ranks in two places": (
        *(PYTORCH_JOB, 'nprocPerNode: "8"', 'nprocPerNode: "4"', {"ranks": 16}),
        *("nprocPerNode", "nvidia.com/gpu"),
    ),
    "ranks of Slurm": (SLURM, "--ntasks-per-node=8", "--ntasks-per-node=4", {"ranks": 16}, "--ntasks-per-node", 4, 8),
    "ranks of a cloud": (SKYPILOT, "H100:8", "H100:4", {}, "accelerators", 16, 32),
    "ranks of a node": (
        TRAIN_JOB,
        "",
        "",
        {"flags": "--dry-run --world-size 32 --ranks-per-node 4"},
        "--ranks-per-node",
        4,
    ),
    "memory of the device": (JOB, "", "", {"memory": LARGE}, "NVIDIA-H100-80GB-HBM3", "80 GB"),
    "memory of a device with a longer name": (
        *(JOB, "NVIDIA-H100-80GB-HBM3", "NVIDIA-Tesla-T4", {"memory": LARGE}),
        *("NVIDIA-Tesla-T4", "16 GB"),
    ),
    "logs that are not mounted": (JOB, "", "", {"flags": "--log-dir /logs"}, "--log-dir /logs"),
    "main memory": (JOB, "", "", {"memory": OFFLOADED}, "1099.51 GB", "the limit memory"),
    "more than the limit of memory": (
        *(JOB, REQUESTS, 'requests: {cpu: "64", memory: 2Ti}', {}),
        *("2Ti", "1Ti"),
    ),
    "other GPUs than the limit": (
        *(JOB, REQUESTS, 'requests: {cpu: "64", memory: 1Ti, nvidia.com/gpu: 4}', {}),
        *("nvidia.com/gpu 4", "limit 8"),
    ),
    "copy of async saves": (
        *(JOB, f"{REQUESTS}\n            {LIMITS}", "limits: {nvidia.com/gpu: 8, memory: 48Gi}"),
        {"flags": "--async-save"},
        *("--async-save", "51.54 GB"),
    ),
    "copies in shared memory": (
        *(JOB, "", ""),
        {"flags": "--non-persistent-save-interval 5 --non-persistent-ckpt-type in_memory", "memory": COPIED},
        *("/dev/shm", "--non-persistent-ckpt-type in_memory", "68.72 GB"),
    ),
    "no shared memory": (JOB, "- {name: shm, mountPath: /dev/shm}", "", {}, "/dev/shm", "67.1 MB"),
    "shared memory above the limit": (JOB, "sizeLimit: 64Gi", "sizeLimit: 2Ti", {}, "/dev/shm", "2199.02 GB"),
    "a folder that is not mounted": (JOB, "", "", {"flags": "--save /scratch/run"}, "--save /scratch/run"),
    "a folder of the container": (SKYPILOT, "", "", {"flags": "--save runs/x"}, "--save runs/x"),
    "a folder that can't be written": (JOB, "", "", {"flags": "--save /data/run"}, "--save /data/run", "volume data"),
    "a folder that doesn't last": (JOB, "", "", {"flags": "--save /dev/shm/run"}, "--save /dev/shm/run", "volume shm"),
    "data that are elsewhere": (
        JOB,
        "mountPath: /data,",
        "mountPath: /datasets,",
        {},
        "--data-path /data/fineweb_text_document",
    ),
    "a variable": (JOB, "value: /runs/llama3_8b", "value: /runs/other", {}, "CHECKPOINT_PATH", "/runs/other"),
    "a flag of the command": (
        *(
            JOB,
            "args: [--exit-signal-handler]\n          env",
            'args: [--exit-signal-handler, --lr, "3e-4"]\n          env',
        ),
        *({}, "--lr", "0.01"),
    ),
    "time to save": (
        JOB,
        "terminationGracePeriodSeconds: 900",
        "terminationGracePeriodSeconds: 700",
        {"memory": SLOW},
        700,
    ),
    "the default time to save": (JOB, "terminationGracePeriodSeconds: 900", "dnsPolicy: Default", {}, 30, 600),
    "time of Slurm": (SLURM, "B:USR1@600", "B:USR1@60", {"memory": SLOW}, "#SBATCH --signal", 60),
    "no signal handler": (
        *(JOB, "args: [--exit-signal-handler]\n          env", "args: []\n          env"),
        {"without": "--exit-signal-handler"},
        "--exit-signal-handler",
    ),
    "health that nobody writes": (
        JOB,
        "",
        "",
        {"without": "--health-file /tmp/health.json"},
        "startupProbe",
        "/tmp/health.json",
    ),
    "health elsewhere": (JOB, "", "", {"flags": "--health-file /tmp/other.json"}, "/tmp/other.json", "livenessProbe"),
    "a service": (JOB, "subdomain: llama3-8b", "subdomain: other", {}, "subdomain", "MASTER_ADDR"),
    "node 0": (JOB, "value: llama3-8b-0.llama3-8b", "value: llama-0.llama3-8b", {}, "llama3-8b-0.llama3-8b"),
    "pods without numbers": (JOB, "completionMode: Indexed", "completionMode: NonIndexed", {}, "completionMode"),
    "a check of other settings": (JOB, "--dry-run]", "--dry-run, --lr, x]", {}, "init container check", "--lr"),
    "nodes that differ": (PYTORCH_JOB, "value: /runs/llama3_8b", "value: /runs/a", {}, "variables", "Worker", "Master"),
    "a container's name": (PYTORCH_JOB, "name: pytorch\n", "name: train\n", {}, "pytorch", "Worker"),
}
"""Kinds of disagreement: example, what is changed in it, arguments of ``found``, facts that the sentences have."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_disagrees_is_named(kind: str, tmp_path: Path) -> None:
    """Each cost a start on the cluster, or hours of training that were not saved."""
    example, old, new, arguments, *facts = KINDS[kind]
    sentences = found(example, tmp_path, old=old, new=new, **arguments)
    assert sentences
    check_sentence("\n".join(sentences), *facts)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("#!/bin/bash\necho\n", ["#SBATCH"]),
        ("#!/bin/bash\n#SBATCH --nodes=0\n", ["--nodes", "'0'"]),
        ("#!/bin/bash\n#SBATCH --mem=lots\n", ["--mem", "'lots'"]),
        ("#!/bin/bash\n#SBATCH --comment='open\n", [":2"]),
        ("a: 1\n", ["apiVersion", "run"]),
        ("- 1\n", ["Kubernetes"]),
        ("", ["Kubernetes"]),
        ("run: x\nresources: {accelerators: {A: 1, B: 2}}\n", ["accelerators"]),
        ("apiVersion: v1\nkind: Service\n", ["0 jobs", "Service"]),
        ("apiVersion: batch/v1\nkind: Job\nspec: {}\n", ["without containers"]),
        ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {}\n", ["pytorchReplicaSpecs"]),
        ("apiVersion: x\nkind: TrainJob\nspec: {runtimeRef: {name: torch}}\n", ["torch", "TrainingRuntime"]),
        ("a: [\n", ["YAML"]),
    ],
)
def test_files_that_say_nothing_are_refused(text: str, facts: list[str], tmp_path: Path) -> None:
    """One sentence instead of a traceback, before anything is compared."""
    path = tmp_path / "file"
    path.write_text(text)
    with expect_error(ConfigError, *facts):
        read_launch_file(str(path))


@pytest.mark.parametrize("broken", ["1", "[]", '{"template": []}', '{"pytorchReplicaSpecs": [1]}', '{"trainer": 3}'])
@pytest.mark.parametrize("kind", ["Job", "PyTorchJob", "TrainJob"])
def test_parts_of_another_kind_are_refused(kind: str, broken: str, tmp_path: Path) -> None:
    """A list where a mapping should be was a traceback."""
    path = tmp_path / "file.yaml"
    path.write_text(f'{{"apiVersion": "v1", "kind": "{kind}", "spec": {broken}}}')
    with pytest.raises(ConfigError):
        read_launch_file(str(path))


def test_parts_of_a_heterogeneous_job_are_added(tmp_path: Path) -> None:
    """The nodes behind ``hetjob`` were not counted."""
    path = tmp_path / "job.sbatch"
    path.write_text(
        "#!/bin/bash\n#SBATCH -N 2 --gres=gpu:h100:8\n#SBATCH --container-image=x\n"
        "#SBATCH --container-mounts=/d:/data:ro,/runs\n#SBATCH hetjob\n#SBATCH --nodes=3\n#SBATCH --gres=gpu:h100:8\n"
    )
    file = read_launch_file(str(path))
    assert (file.world_size, file.gpu and file.gpu.value) == (40, "h100")
    assert [(each.path, each.read_only) for each in file.mounts or ()] == [("/data", True), ("/runs", False)]
