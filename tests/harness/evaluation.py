"""A small random GPT-2 with a tokenizer of its own, in both formats, and texts in the form of WikiText and LAMBADA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import models, pre_tokenizers, trainers

from megatron.config.parse import parse_run
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.gpt2_bpe import byte_level
from megatron.training.checkpoints.loading import saved_config
from tasks.registry import TASKS
from tasks.result import TaskResult
from tasks.settings import TaskConfig

# Written for these tests, with the oddities of WikiText's files: blanks around marks, at line ends, @-@, <unk>.
WIKITEXT = """
 = The <unk> Lighthouse =

 The <unk> Lighthouse is a 31 @.@ 5 @-@ metre tower on the north coast of the island . It was built in 1874 , at a cost
 of 12 @,@ 500 pounds , and its keepers ' houses were added four years later .

 = = History = =

 Sailors called it " the old candle " ; on clear nights its light could be seen from 18 miles ( about 29 km ) away .
 The keeper 's log of 1881 says : " No ship lost this winter , and none the winter before ! "

 = = = Restoration = = =

 After the storm of 1953 the lamp was out for N days . It didn 't shine again until a group of [ local ] volunteers
 raised the money , <unk> by <unk> , and the tower 's stairs were mended . Who would have thought so ?
""".replace("\n", " \n")
# The same as text; two apostrophes count as a pair of quotes, so the one of a plural joins the words around it.
WIKITEXT_AS_TEXT = """
= The <unk> Lighthouse =

The <unk> Lighthouse is a 31.5-metre tower on the north coast of the island. It was built in 1874, at a cost
of 12,500 pounds, and its keepers'houses were added four years later.

== History ==

Sailors called it "the old candle"; on clear nights its light could be seen from 18 miles (about 29 km) away.
The keeper's log of 1881 says: "No ship lost this winter, and none the winter before!"

=== Restoration ===

After the storm of 1953 the lamp was out for 1 days. It didn 't shine again until a group of [local] volunteers
raised the money, <unk> by <unk>, and the tower's stairs were mended. Who would have thought so?
"""
OPENINGS = (
    "The keeper of the lighthouse looked at the sea and",
    "After the storm nobody asked who had",
    "It was built in 1874, and the island",
    "Sailors called it the old candle; the keeper called it his",
    "On clear nights the light of the tower could be seen from the",
    'No ship was lost this winter, and the log says: "none the winter',
    "The volunteers",
)


@dataclass(frozen=True)
class SmallGPT2:
    """``hf``: the folder for transformers. ``native``: checkpoints for ``--load``; both have the tokenizer's files."""

    hf: Path
    native: Path

    def transformers_model(self) -> Any:
        """The model as transformers runs it."""
        import transformers

        model: Any = transformers.GPT2LMHeadModel.from_pretrained(self.hf)
        return model.eval()

    def transformers_tokenizer(self) -> Any:
        """The tokenizer as transformers has it."""
        import transformers

        return transformers.GPT2Tokenizer(str(self.hf / "vocab.json"), str(self.hf / "merges.txt"))


def small_gpt2(
    folder: Path, *, layers: int = 4, positions: int = 64, vocab: tuple[Path, Path] | None = None
) -> SmallGPT2:
    """Write one, with weights so large that it has firm opinions. ``vocab``: vocab.json and merges.txt to use."""
    import transformers

    hf, native = folder / "hf", folder / "native"
    hf.mkdir(parents=True)
    if vocab is None:
        _train_bpe().model.save(str(hf))
    else:
        for path, name in zip(vocab, ("vocab.json", "merges.txt")):
            (hf / name).write_bytes(path.read_bytes())
    words = len(json.loads((hf / "vocab.json").read_text(encoding="utf-8")))
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": positions}
    torch.manual_seed(5)
    special = json.loads((hf / "vocab.json").read_text(encoding="utf-8"))["<|endoftext|>"]
    sizes |= {"bos_token_id": special, "eos_token_id": special}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=words, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.15)
    model.save_pretrained(hf)
    convert(Conversion("hf", hf, "megatron", native, skip_proof=True), say=lambda line: None)
    return SmallGPT2(hf, native)


def _train_bpe() -> Any:
    pipeline = byte_level(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator([WIKITEXT_AS_TEXT, *OPENINGS] * 3, trainer)
    return pipeline


def run_task(context: ParallelContext, *flags: str) -> TaskResult:
    """A task on this rank, as tasks/main.py runs it."""
    task = TASKS[flags[flags.index("--task") + 1]]
    config = parse_run(
        flags,
        prog="tasks/main.py",
        world_size=context.mesh.world_size,
        extra_groups=(TaskConfig, *GPT_GROUPS),
        checkpoint_config=saved_config,
        defaults=task.defaults,
    )
    return task.load()(config, context)
