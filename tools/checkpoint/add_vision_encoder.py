"""Put a published encoder of images in front of a language model, and prove both parts.

The projector between them is new: train it first with --load, --finetune, --freeze-LM and --freeze-ViT.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.core.files.remote_path import path_of
from megatron.errors import kept_on_interrupt, run_command


class AssembleConfig(Settings):
    """Which language model and which encoder become one model."""

    load: str = flag("Folder of the language model: of checkpoints, or with --from hf of a Hugging Face model.")
    source: Literal["megatron", "hf"] = flag("Format of --load.", name="--from", default="megatron")
    vision_load: str = flag("Folder of a Hugging Face CLIP or SigLIP, whole or its encoder of images alone.")
    save: str = flag("New folder for the checkpoint.")
    image_token_id: int | None = flag(
        "Id that stands at the places of images; that of <image> unless given.", default=None, at_least=0
    )
    seed: int = flag("Seed of the projector's weights.", default=1234, at_least=1)


def main(argv: Sequence[str]) -> int:
    """Assemble, and say how far features and logits are apart."""
    (config,) = parse_groups(argv, AssembleConfig, prog="add_vision_encoder.py", about=__doc__ or "")
    from megatron.core.conversion.convert import check_target
    from megatron.core.conversion.huggingface.reading import read_huggingface
    from megatron.core.conversion.native import read_native, write_native
    from megatron.core.conversion.proof import compare, native_answer, portable_answer, transformers_version
    from megatron.core.conversion.questions import question_for
    from megatron.core.conversion.remote import becoming
    from megatron.core.models.vlm.assembling import assembled, features_differ

    transformers_version()
    load, save = path_of(config.load), path_of(config.save)
    check_target(save)
    if config.source == "hf":
        text = read_huggingface(_folder(config.load, flag="--load"))
    else:
        text = read_native(load)
    encoder = _folder(config.vision_load, flag="--vision-load")
    made = assembled(text, encoder, image_token_id=config.image_token_id, seed=config.seed)
    for note in made.notes:
        print(note)
    features = features_differ(made, encoder)
    question = question_for(text.model, text.groups)  # of texts alone
    with (
        kept_on_interrupt(lambda: f"nothing is written to --save {save}"),
        becoming(save, say=print, check=lambda: check_target(save)) as aside,
    ):
        write_native(made, aside, final=save)
        found = compare(portable_answer(text, question), native_answer(aside, question))
    print(f"proof: of texts, {found}; of an image, features differ by {features:.2e} of the largest")
    print(f"wrote {save}: {made.num_parameters:,} parameters, of {text.num_parameters:,} in the language model")
    return 0


def _folder(name: str, *, flag: str) -> Path:
    """A Hugging Face model's folder, or a repository's in the cache. Raises CheckpointError."""
    from megatron.core.conversion.huggingface.hub import model_folder

    found = model_folder(Path(name), flag=flag, say=print)
    assert isinstance(found, Path), "a path of this machine"
    return found


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
