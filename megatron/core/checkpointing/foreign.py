"""What another program has left in a folder: which program's files they are, and what makes a model of ours of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from contextlib import suppress
from fnmatch import filter as matching
from typing import Any

from megatron.core.checkpointing.folders import TRACKER, iteration_of
from megatron.core.checkpointing.manifest import MANIFEST, listed
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError
from megatron.small_files import read_json

_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_CONVERTER = "tools/checkpoint/convert.py"
# Files by which a program's folder is known, what it is, and what to give instead.
_KNOWN = {
    "model_index.json": "is a pipeline of diffusers, which makes images, and no language model",
    "config_sentence_transformers.json": "is a folder of sentence-transformers: give the folder of its transformer, "
    "often 0_Transformer, which has a config.json",
    "*.gguf": "holds a model in llama.cpp's format (GGUF): convert it with --from gguf, or start a run from it with "
    "--load-hf",
    "params.json": "is a model in the format in which Meta and Mistral publish weights: give the same model in Hugging "
    "Face's format, whose folder has a config.json",
    "*.nemo": "holds a model of NeMo's, which isn't read: export it there to Hugging Face's format, and give that",
    "zero_to_fp32.py": "is a checkpoint of DeepSpeed's: the script zero_to_fp32.py in it gathers the weights; give a "
    "folder that holds them beside the model's config.json",
}
# Weights of other libraries beside a config.json.
_OTHER_WEIGHTS = {
    "*.gguf": "llama.cpp (GGUF)",
    "tf_model*.h5": "TensorFlow",
    "flax_model*.msgpack": "Flax",
    "*.onnx": "ONNX",
    "consolidated*": "Meta's or Mistral's own code",
    "*.ckpt": "another trainer",
}


def foreign_format(folder: AnyPath) -> str | None:
    """A sentence about a checkpoint that another program wrote: its format, and how to convert it; None for others."""
    root = folder.parent if iteration_of(folder) is not None or folder.name == "release" else folder
    if any(folder.glob("mp_rank_*/model*rng.pt")):
        return f"it is in Megatron-LM's torch format: {_convert('megatron-lm', root)}"
    if (folder / "common.pt").exists() or (folder / "metadata.json").exists():
        return f"it is in Megatron-LM's torch_dist format: {_convert('megatron-lm', root)}"
    if (folder / _CONFIG).exists() and any(itertools.chain(folder.glob("*.safetensors"), folder.glob("*.bin"))):
        return (
            f"it is a Hugging Face model: training starts from it with --load-hf {folder} in place of --load; for any "
            f"other command {_convert('hf', root)}"
        )
    if (folder / _ADAPTER).exists():
        return f"it {_adapter(folder)}, and then {_convert('hf', 'THAT_FOLDER')}"
    return None


def no_huggingface_model(folder: AnyPath) -> str | None:
    """What a folder without a ``config.json`` is, to follow its name in a sentence; None where nothing tells."""
    names = [path.name for path in folder.iterdir()]
    if _ADAPTER in names:
        return _adapter(folder)
    if found := checkpoints_in(folder, names):
        return found
    for pattern, said in _KNOWN.items():
        if matching(names, pattern):
            return said
    inner = sorted(str(path.parent) for depth in ("*", "snapshots/*") for path in folder.glob(f"{depth}/{_CONFIG}"))
    return f"has no {_CONFIG}, but there is one in {listed(inner, most=3)}: give that folder" if inner else None


def other_weights(folder: AnyPath) -> str | None:
    """Which files a model's folder holds in place of weights that are read; None where there are none."""
    names = [path.name for path in folder.iterdir()]
    if _ADAPTER in names:
        return f"{folder} {_adapter(folder)}"
    found = [whose for pattern, whose in _OTHER_WEIGHTS.items() if matching(names, pattern)]
    return f"its weights are for {' and '.join(found)}" if found else None


def checkpoints_in(folder: AnyPath, names: Collection[str]) -> str | None:
    """Whose checkpoints a folder with files of these ``names`` holds, ours or Megatron-LM's; None for neither."""
    steps = [name for name in sorted(names) if iteration_of(folder / name) is not None or name == "release"]
    places = [folder, *(folder / name for name in steps)]
    if any((place / MANIFEST).exists() for place in places):
        return "holds checkpoints of this project: convert them with --from megatron"
    if any(foreign_format(place) for place in places) or TRACKER in names:
        return "holds checkpoints of Megatron-LM: convert them with --from megatron-lm"
    return None


def _adapter(folder: AnyPath) -> str:
    """The sentence about an adapter, with the model that it is for where the file says it."""
    base = "another model"
    with suppress(OSError, CheckpointError):
        base = (
            read_json(folder / _ADAPTER, dict[str, Any], error=CheckpointError).get("base_model_name_or_path") or base
        )
    return (
        f"is an adapter (LoRA or the like) for {base}, and no whole model: merge the two with peft's merge_and_unload, "
        "save that with save_pretrained, and give its folder"
    )


def _convert(source: str, root: AnyPath | str) -> str:
    return f"convert it with {_CONVERTER} --from {source} --load {root} --to megatron --save NEW_FOLDER"
