"""Launch files of all kinds start one program with one set of flags, and are valid for what reads them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.config.parse import parse_run
from megatron.core.models.registry import FAMILIES
from megatron.planning.launch.read import read_launch_file
from tests.end_to_end.commands import ROOT, run, words_for_python
from tools.check_launch import script_and_flags

FOLDER = ROOT / "examples"
FILES = (
    *("kubernetes/job.yaml", "kubernetes/pytorchjob.yaml", "kubernetes/trainjob.yaml"),
    *("slurm/train_gpt.sbatch", "skypilot/train_llama3_8b.yaml"),
)
PATHS = {"CHECKPOINT_PATH": "run", "DATA_PATH": "data", "TOKENIZER_MODEL": "model"}
KUBEFLOW = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "node0"}
SURROUNDINGS: dict[str, Mapping[str, str]] = {
    "kubernetes/job.yaml": {"NODE_RANK": "2", "MASTER_ADDR": "node0"},
    "kubernetes/pytorchjob.yaml": KUBEFLOW,
    "kubernetes/trainjob.yaml": KUBEFLOW,
    "skypilot/train_llama3_8b.yaml": {"NODES": "4", "GPUS_PER_NODE": "8", "NODE_RANK": "2", "MASTER_ADDR": "node0"},
}
"""What a cluster's controller, or the file's own lines, add to the variables of node 2."""
TORCHRUN = (
    "-m torch.distributed.run --nnodes 4 --nproc-per-node 8 --node-rank 2 --master-addr node0 --master-port 29500"
)


def words_of(example: str, checkout: Path, *more: str, **variables: str) -> list[str]:
    """What a launch file starts Python with."""
    file = read_launch_file(str(FOLDER / example))
    said = {name: value for name, value in file.variables.items() if name != "HEALTH_FILE"}
    return words_for_python(*script_and_flags(file), *more, checkout=checkout, **{**said, **variables})


def documents(example: str) -> list[Any]:
    """The YAML documents of a launch file."""
    return list(yaml.safe_load_all((FOLDER / example).read_text(encoding="utf-8")))


def test_all_launch_files_start_the_same_program_with_the_same_flags(tmp_path: Path) -> None:
    """A flag that one file lacked made a run on the cloud another one than that on Slurm."""
    laptop = ("examples/llama/train_llama3_8b.sh", "--exit-signal-handler")
    expected = words_for_python(*laptop, checkout=tmp_path, NODES="4", NODE_RANK="2", MASTER_ADDR="node0", **PATHS)
    assert " ".join(expected[: len(TORCHRUN.split())]) == TORCHRUN
    for example, variables in SURROUNDINGS.items():
        assert words_of(example, tmp_path, **{**PATHS, **variables}) == expected, example
    program = expected[len(TORCHRUN.split()) :]
    checks = [words_of(each, tmp_path, "--dry-run", "--launch-file", str(FOLDER / each), **PATHS) for each in FILES]
    groups, settings = FAMILIES["gpt"].groups, []
    for words in checks:
        assert words[: len(program)] == program
        found = parse_run(words[1:], world_size=1, extra_groups=groups, ranks_in=lambda path: 32)
        settings.append(found.to_json() | {"command": None})
    assert all(each == settings[0] for each in settings)


def test_the_check_of_a_launch_file_says_what_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one command, before it waits in a queue: ranks, memory and that nothing disagrees, or what does."""
    monkeypatch.chdir(ROOT)
    example = FOLDER / "kubernetes/job.yaml"
    words = words_of("kubernetes/job.yaml", tmp_path, "--dry-run", "--no-check-files", "--launch-file", str(example))
    words += ["--health-file", "/tmp/health.json"]
    printed = run(words[0], "", *words[1:])
    assert "an indexed Job, 4 x 8 ranks" in printed
    assert "32 ranks on 4 nodes of 8" in printed
    printed = run(words[0], "", *words[1:], "--world-size", "16", "--ranks-per-node", "8", expect=2)
    assert re.search(r"error: .*job\.yaml: it starts 32 ranks .* and the settings are for 16", printed)


@pytest.mark.slow  # starts the tool, bash and Python as a user does
@pytest.mark.parametrize("example", FILES)
def test_check_launch_accepts_the_examples(example: str) -> None:
    """The line at the head of each file, word for word."""
    tool = [sys.executable, "tools/check_launch.py", str(Path("examples", example)), "--no-check-files"]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing disagrees" in done.stdout


def test_container_of_pyxis_gets_image_mounts_and_the_same_flags(tmp_path: Path) -> None:
    """srun starts each rank in the container; the dry run before it, too, as the checkout is the image's."""
    variables = {"SLURM_JOB_ID": "1", "CONTAINER_IMAGE": "host#name:1", "CONTAINER_MOUNTS": "/data:/data:ro"}
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintf '%s\\0' srun \"$@\"\n")
    srun.chmod(0o755)
    script, path = "examples/llama/train_llama3_8b.sh", f"{tmp_path}:{os.environ['PATH']}"
    container = "--container-image host#name:1 --container-workdir /megatron --container-mounts /data:/data:ro python3"
    words = words_for_python(script, checkout=tmp_path, LAUNCH="srun", PATH=path, SLURM_HET_SIZE="2", **variables)
    expected = f"srun --kill-on-bad-exit=0 --wait=60 {container} --het-group=0-1".replace("python3 ", "")
    assert " ".join(words).startswith(f"{expected} python3 pretrain_gpt.py @examples/llama/llama3_8b.flags")
    check = words_for_python(script, "--dry-run", checkout=tmp_path, PATH=path, **variables)
    assert " ".join(check).startswith(f"srun --nodes 1 --ntasks 1 {container} pretrain_gpt.py")


@pytest.mark.parametrize("example", FILES[:3])
def test_manifests_are_valid_for_kubernetes(example: str) -> None:
    """A misspelt field is dropped by the server, or refuses the job when it is submitted."""
    for each in documents(example):
        if each["apiVersion"] in ("v1", "batch/v1"):
            kubernetes = pytest.importorskip("kubernetes_validate")
            kubernetes.validate(each, kubernetes.latest_version(), strict=True)
        elif each["kind"] in ("TrainJob", "TrainingRuntime"):
            models = pytest.importorskip("kubeflow_trainer_api.models")
            model = getattr(models, f"TrainerV1alpha1{each['kind']}").from_dict(each)
            assert without_nothing(model.to_dict()) == without_nothing(each)
        else:
            models, spec = pytest.importorskip("kubeflow.training.models"), each["spec"]
            assert {*spec} <= {*models.KubeflowOrgV1PyTorchJobSpec.attribute_map.values()}
            assert {*spec["runPolicy"]} <= {*models.KubeflowOrgV1RunPolicy.attribute_map.values()}
            for replica in spec["pytorchReplicaSpecs"].values():
                assert {*replica} <= {*models.KubeflowOrgV1ReplicaSpec.attribute_map.values()}
                check_pod(replica["template"]["spec"])


def check_pod(spec: dict[str, Any]) -> None:
    """Raise where Kubernetes doesn't know a field of a pod."""
    kubernetes = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes.validate(pod, kubernetes.latest_version(), strict=True)


def without_nothing(value: Any) -> Any:
    """A value without empty mappings, which models leave out."""
    if isinstance(value, dict):
        return {key: without_nothing(each) for key, each in value.items() if each != {}}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


def test_task_is_valid_for_skypilot() -> None:
    """Its schema, where it is installed."""
    schemas, jsonschema = pytest.importorskip("sky.utils.schemas"), pytest.importorskip("jsonschema")
    found = jsonschema.validators.validator_for(schemas.get_task_schema())(schemas.get_task_schema())
    assert not [error.message for error in found.iter_errors(documents(FILES[4])[0])]


@pytest.mark.parametrize("example", FILES[:3])
def test_pods_run_as_nobody_special_and_are_seen(example: str) -> None:
    """Clusters refuse pods that may be root; without probes a pod that hangs keeps its GPUs."""
    text = (FOLDER / example).read_text(encoding="utf-8")
    pods = text.count(" containers:\n")
    for part in (
        "runAsNonRoot: true",
        "livenessProbe:",
        "startupProbe:",
        "terminationGracePeriodSeconds: 900",
        "mountPath: /dev/shm",
    ):
        assert text.count(part) == pods, part
    assert ":latest" not in text


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.nvidia"])
def test_images_are_pinned_and_run_as_a_user(name: str) -> None:
    """An image of tomorrow's versions is another program; hadolint looks at the rest where it is installed."""
    path = FOLDER / "docker" / name
    text, constraints = path.read_text(encoding="utf-8"), (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE=\S+:\d+\.\d+\S+$", text, re.MULTILINE)
    assert "\nUSER 1000" in text and "\nHEALTHCHECK " in text
    pinned = re.findall(r"\"(\w+==[\d.]+)\"", text)
    assert [each for each in pinned if f"\n{each}\n" not in constraints] == []
    named = re.search(r"'\^\(([\w|-]+)\)=='", text)
    for package in named[1].split("|") if named else []:
        assert re.search(rf"^{package}==", constraints, re.MULTILINE), package
    if shutil.which("hadolint"):
        done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
