"""What a launch file and the settings of a run say differently: ranks, memory, paths, times, flags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.config.flags import plural_s, words
from megatron.config.report import gigabytes
from megatron.config.run import RunConfig
from megatron.core.files.remote_path import is_url
from megatron.planning.estimate import MemoryEstimate
from megatron.planning.launch.launch_file import GIB, LaunchFile, Mount, Said

# Bytes of main memory of each process beside what the run keeps there: Python, torch, CUDA's context.
_PROCESS_BYTES = 4 * GIB
# Bytes of /dev/shm of each rank for the buffers of NCCL.
_NCCL_BYTES = 64 * 2**20
_PREFETCHED = 4  # microbatches that each worker of the loader has ready
_TENSORS_OF_A_BATCH = 5  # tokens, labels, loss mask, attention mask, positions
_SAVE_BYTES_A_SECOND = 1e9  # of a node, to shared storage: an assumption, which the sentence states
_TORCHRUN_SECONDS = 600  # that examples/launch.sh gives ranks to save
GPU_GB = {
    "A100-SXM4-40GB": 40,
    "A100-PCIE-40GB": 40,
    "A100-80GB": 80,
    "A100-SXM4-80GB": 80,
    "A100-PCIE-80GB": 80,
    "H100": 80,
    "H100-80GB-HBM3": 80,
    "H800": 80,
    "H200": 141,
    "B200": 180,
    "GB200": 186,
    "B300": 288,
    "GB300": 288,
    "L4": 24,
    "L40S": 48,
    "A10G": 24,
    "V100": 16,
    "T4": 16,
    "MI300X": 192,
}
"""Memory of models of GPUs in GB, by their names without NVIDIA's."""
_OF_VARIABLES = {
    "CHECKPOINT_PATH": ("save", "load"),
    "DATA_PATH": ("data_path",),
    "TOKENIZER_MODEL": ("tokenizer_model",),
    "VOCAB_FILE": ("vocab_file",),
    "MERGE_FILE": ("merge_file",),
    "TENSORBOARD_LOGS_PATH": ("tensorboard_dir",),
    "HEALTH_FILE": ("health_file",),
}
_WRITTEN = ("save", "tensorboard_dir", "save_hf", "wandb_save_dir", "log_json", "log_dir")
_READ = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "vocab_file", "merge_file"),
    "tokenizer_model",
    "pretrained_checkpoint",
)


def disagreements(run: RunConfig, file: LaunchFile, memory: MemoryEstimate) -> list[str]:
    """A sentence for each thing that ``file`` and the settings, or two places of the file, say differently.

    ``memory``: of the rank that needs most.
    """
    found = [
        *file.problems,
        *_ranks(run, file),
        *_device_memory(file, memory),
        *_host_memory(run, file, memory),
        *_shared_memory(run, file, memory),
        *_paths(run, file),
        *_variables(run, file),
        *_flags(run, file),
        *_times(run, file, memory),
        *_health(run, file),
    ]
    return [f"{file.path}: {each}" for each in dict.fromkeys(found)]


def described(run: RunConfig, file: LaunchFile) -> str:
    """A launch file that agrees with the run, in a line."""
    per_node = file.ranks_per_node[0].value if file.ranks_per_node else run.command.ranks_per_node
    parts = [f"{run.world_size // per_node:,} x {per_node} ranks"]
    if file.gpu is not None:
        parts.append(f"on {file.gpu.value}")
    if file.memory is not None:
        parts.append(f"{gigabytes(file.memory.value)} of main memory a node")
    if file.grace is not None:
        parts.append(f"{file.grace.value} s to save")
    return f"{file.path}: {file.kind}, {', '.join(parts)}; nothing disagrees"


def _differing(said: Sequence[Said[int]], what: str) -> Iterator[str]:
    """A sentence where places of the file say different numbers."""
    first, *others = said
    for each in others:
        if each.value != first.value:
            yield f"{first.where} says {first.value} {what} and {each.where} says {each.value}; make them agree"


def _ranks(run: RunConfig, file: LaunchFile) -> Iterator[str]:
    if len(file.nodes) > 1:
        yield from _differing(file.nodes, f"node{plural_s(file.nodes[0].value)}")
    if len(file.ranks_per_node) > 1:
        yield from _differing(file.ranks_per_node, "ranks of a node")
    started = file.world_size
    if started is not None and started != run.world_size:
        nodes = f"{file.nodes[0].value} from {file.nodes[0].where}" if file.nodes else "1"
        per_node = file.ranks_per_node[0]
        yield (
            f"it starts {started:,} ranks (nodes: {nodes}; ranks of each: {per_node.value} from {per_node.where}), "
            f"and the settings are for {run.world_size:,}; change the file, or NODES and GPUS_PER_NODE or --world-size"
        )
    elif file.ranks_per_node and run.command.world_size is not None:
        per_node, asked = file.ranks_per_node[0], run.command.ranks_per_node
        if per_node.value != asked:
            yield (
                f"{per_node.where} says {per_node.value} ranks of a node, and --ranks-per-node is {asked}; "
                "make them agree"
            )


def _device_memory(file: LaunchFile, memory: MemoryEstimate) -> Iterator[str]:
    if file.gpu is None:
        return
    name = re.sub(r"^(?:(?:NVIDIA|Tesla|AMD)-)+", "", file.gpu.value, flags=re.IGNORECASE).upper()
    sizes = {known.upper(): size for known, size in GPU_GB.items()}
    size = sizes.get(name)
    if size is not None and memory.total > size * 1e9:
        yield (
            f"{file.gpu.where} is {file.gpu.value}, which has {size} GB, and a rank needs {gigabytes(memory.total)}; "
            f"--dry-run --device-memory-gb {size} lists layouts that fit"
        )


def _host_memory(run: RunConfig, file: LaunchFile, memory: MemoryEstimate) -> Iterator[str]:
    if file.memory is None or not file.ranks_per_node:
        return
    each = _PROCESS_BYTES + memory.offloaded + memory.activations_offloaded
    asked = run.checkpoint
    copies = asked.save_retry_copies if asked.async_save or asked.save_retry_copies > 1 else 0
    copied = copies * (memory.weights + memory.main_params + memory.moments)
    kept = _copies_in_memory(run, memory)
    needed = file.ranks_per_node[0].value * (each + copied + kept)
    if needed > file.memory.value:
        parts = [f"{gigabytes(_PROCESS_BYTES)} for the process"]
        parts += [f"{gigabytes(memory.offloaded)} of offloaded optimizer state"] if memory.offloaded else []
        parts += (
            [f"{gigabytes(memory.activations_offloaded)} of offloaded activations"]
            if memory.activations_offloaded
            else []
        )
        of_what = "--async-save" if asked.async_save else "--save-retry-copies"
        parts += [f"{gigabytes(copied)} for the cop{'y' if copies == 1 else 'ies'} of {of_what}"] if copied else []
        parts += [f"{gigabytes(kept)} for --non-persistent-ckpt-type in_memory"] if kept else []
        yield (
            f"{file.memory.where} is {gigabytes(file.memory.value)}, and {file.ranks_per_node[0].value} ranks need "
            f"{gigabytes(needed)} of main memory ({', '.join(parts)} each); raise it, or offload less"
        )


def _copies_in_memory(run: RunConfig, memory: MemoryEstimate) -> int:
    """Bytes in /dev/shm for each rank: a copy on nodes and the one before, of its own state and of its partners'."""
    asked = run.checkpoint
    if asked.non_persistent_ckpt_type != "in_memory":
        return 0
    parts = asked.replication_factor if asked.replication else 1
    return 2 * parts * (memory.weights + memory.main_params + memory.moments)


def _shared_memory(run: RunConfig, file: LaunchFile, memory: MemoryEstimate) -> Iterator[str]:
    if file.shared_memory is None or not file.ranks_per_node:
        return
    ranks = file.ranks_per_node[0].value
    batch = run.training.micro_batch_size * run.tokens_per_sample * 8 * _TENSORS_OF_A_BATCH
    copies = _copies_in_memory(run, memory)
    needed = ranks * (run.data.num_workers * _PREFETCHED * batch + (_NCCL_BYTES if run.world_size > 1 else 0) + copies)
    if needed > file.shared_memory.value:
        yield (
            f"/dev/shm has {gigabytes(file.shared_memory.value)} ({file.shared_memory.where}), and {ranks} ranks need "
            f"about {gigabytes(needed)} for NCCL{', --non-persistent-ckpt-type in_memory' if copies else ''} and "
            f"--num-workers {run.data.num_workers}; mount an emptyDir of medium "
            "Memory there, with a larger sizeLimit"
        )
    if file.memory is not None and file.shared_memory.value > file.memory.value:
        yield (
            f"/dev/shm may grow to {gigabytes(file.shared_memory.value)} ({file.shared_memory.where}), and counts as "
            f"memory, of which {file.memory.where} is {gigabytes(file.memory.value)}; lower the former "
            "or raise the latter"
        )


def _paths(run: RunConfig, file: LaunchFile) -> Iterator[str]:
    if file.mounts is None:
        return
    for spec in run.flags():
        if spec.field not in (*_WRITTEN, *_READ):
            continue
        given = run.value(spec)
        for path in [given] if isinstance(given, str) else given or ():
            if re.fullmatch(r"[0-9.]+", path) or is_url(path):  # a weight of a blend, storage that needs no mount
                continue
            yield from _path(f"{spec.positive} {path}", path, file.mounts, writes=spec.field in _WRITTEN)


def _path(typed: str, path: str, mounts: Sequence[Mount], *, writes: bool) -> Iterator[str]:
    holding = [each for each in mounts if f"{path}/".startswith(f"{each.path.rstrip('/')}/")]
    mount = max(holding, key=lambda each: len(each.path), default=None)
    if mount is None:
        if writes or path.startswith("/") or not Path(path).exists():  # else a file of the checkout, as the image has
            lost = "what is written there is lost with the container" if writes else "it is not in the container"
            seen = ", ".join(each.path for each in mounts) or "none"
            yield f"{typed} is in no mount ({seen}), so {lost}; mount its folder, or give another path"
    elif writes and mount.read_only:
        yield (
            f"{typed} is in {mount.where}, which is mounted for reading alone; mount it for writing, or give another "
            "path"
        )
    elif writes and not mount.lasts:
        yield (
            f"{typed} is in {mount.where}, which ends with the container; use a volume that lasts, or give another path"
        )


def _variables(run: RunConfig, file: LaunchFile) -> Iterator[str]:
    specs = {spec.field: spec for spec in run.flags()}
    for name, fields in _OF_VARIABLES.items():
        if name not in file.variables:
            continue
        expected = file.variables[name]
        for each in fields:
            spec = specs.get(each)
            value = None if spec is None else run.value(spec)
            used = " ".join(value) if isinstance(value, tuple) else value
            if spec is not None and used is not None and used != expected:
                yield f"its variable {name} is {expected}, and {spec.positive} is {used}; make them agree"


def _flags(run: RunConfig, file: LaunchFile) -> Iterator[str]:
    """Flags after the script's name in the file's command that this run was not given so."""
    specs = {spelling: spec for spec in run.flags() for spelling in spec.spellings()}
    for at, word in enumerate(file.words):
        flag, equals, value = word.partition("=")
        spec = specs.get(flag)
        if spec is None or "$" in word or spec.is_switch or spec.field in ("world_size", "ranks_per_node"):
            continue
        following = file.words[at + 1 : at + 2]
        value = value if equals else (following[0] if following and not following[0].startswith("-") else "")
        used = words(run.value(spec)).split(" ")[0]
        if value and "$" not in value and value != used:
            yield f"its command has {flag} {value}, and here {spec.positive} is {used or 'not given'}; make them agree"


def _times(run: RunConfig, file: LaunchFile, memory: MemoryEstimate) -> Iterator[str]:
    if file.grace is None or run.checkpoint.save is None:
        return
    catches = run.training.exit_signal_handler or "--exit-signal-handler" in file.words
    if file.stops_early and not catches:
        yield f"{file.stops_early}, and without --exit-signal-handler a run ends at the signal, unsaved; add the flag"
    if not file.ranks_per_node:
        return
    written = file.ranks_per_node[0].value * (memory.weights + memory.main_params + memory.moments)
    seconds = written / _SAVE_BYTES_A_SECOND
    if seconds > file.grace.value:
        yield (
            f"{file.grace.where} gives {file.grace.value} s, and saving {gigabytes(written)} a node takes "
            f"{seconds:.0f} s at 1 GB/s; raise it, or what is lost is the time since the last --save-interval"
        )
    kills = int(file.variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_SECONDS))
    if file.mounts is not None and file.shared_memory is not None and kills >= file.grace.value:
        yield (
            f"{file.grace.where} gives {file.grace.value} s, and torchrun lets ranks save for {kills} s "
            "(TORCH_ELASTIC_SHUTDOWN_TIMEOUT); give more than that, or lower the variable"
        )


def _health(run: RunConfig, file: LaunchFile) -> Iterator[str]:
    written = run.reporting.health_file
    for probe in file.health:
        if written is None:
            yield f"its {probe.where} reads {probe.value}, and the run writes no --health-file; set HEALTH_FILE to it"
        elif written != probe.value:
            yield f"its {probe.where} reads {probe.value}, and --health-file is {written}; make them agree"
