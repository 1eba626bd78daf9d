"""Which saved arguments of a Megatron-LM checkpoint are taken, refused by name, or ignored on the user's word."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron.config.family import FamilyConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.arguments import check_is_known
from megatron.core.conversion.megatron_lm.known_arguments import LIMITED, READ, WITHOUT_EFFECT, limits, unknown
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.native import read_native
from megatron.errors import CheckpointError, ConfigError
from tests.harness.data import REPOSITORY
from tests.harness.sentences import expect_error
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, arguments, random_tensors, write_torch
from tools.checkpoint import convert as tool

CHANGES: dict[str, Any] = {
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "normalization": "L2Norm",
    "rope_type": "yarn",
    "rotary_base_per_layer": [1e4, 1e6],
    "use_mup": True,
    "spec": ["my.layers", "build"],
    "experimental_attention_variant": "dsa",
}


def check(**values: Any) -> None:
    """What a conversion says about saved arguments, in milliseconds."""
    saved = Arguments(arguments({**CLASSIC, **values}), "x/model_optim_rng.pt")
    check_is_known(saved, FamilyConfig)


def test_arguments_that_change_the_function_are_refused_together() -> None:
    """Each moved logits by 0.2 to 1.4 of the largest and left no trace in names or shapes."""
    facts = [f"({name} = {value!r})" for name, value in CHANGES.items()]
    with expect_error(CheckpointError, "x/model_optim_rng.pt", *facts):
        check(**CHANGES)
    for name, value in CHANGES.items():
        assert name in LIMITED
        with expect_error(CheckpointError, name, f"{value!r}"):
            check(**{name: value})


def test_values_under_which_a_model_is_one_of_ours() -> None:
    """Defaults, dependents of what is off, and specifications that build the usual layers."""
    check(
        **dict.fromkeys(LIMITED),
        kv_lora_rank=512,
        moe_router_topk=8,
        mamba_state_dim=128,
        linear_conv_kernel_dim=4,
        rotary_scaling_factor=40.0,
    )
    check(rope_type="rope", glu_linear_offset=0.0, normalization="RMSNorm", num_experts=0)
    check(spec=["megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_with_transformer_engine_spec"])


def test_unknown_arguments() -> None:
    """A fork's, or tomorrow's: off is harmless, else the user has to know."""
    check(embedding_multiplier=None, use_alibi=False, extra=0, more=[], name="")
    facts = ("use_mup = True", "embedding_multiplier = 12.0", "use_alibi = True", "--ignore-saved-args NAME")
    with expect_error(CheckpointError, *facts):
        check(use_mup=True, embedding_multiplier=12.0, use_alibi=True)


def test_ignoring_is_for_what_is_unknown(tmp_path: Path) -> None:
    """On the user's word an unknown argument is left out, in the conversion and in its proof; a known one never is."""
    values = random_tensors(ModelConfig(**CLASSIC))
    write_torch(tmp_path / "x", CLASSIC, values, style="core", cluster="north", use_mup=True)
    with expect_error(CheckpointError, "--ignore-saved-args use_mup"):
        read_megatron_lm(tmp_path / "x", ignored=["cluster", "use_mup"])
    with expect_error(CheckpointError, "MuP's"):
        read_megatron_lm(tmp_path / "x", ignored=["cluster"])
    write_torch(tmp_path / "y", CLASSIC, values, style="core", cluster="north")
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path / "y")
    words = f"--from megatron-lm --load {tmp_path / 'y'} --to megatron --save {tmp_path / 'ours'}"
    tool.main([*words.split(), "--ignore-saved-args", "cluster"])
    assert read_native(tmp_path / "ours").model.num_layers == 4
    with expect_error(ConfigError, "--ignore-saved-args", "--from megatron-lm"):
        tool.main(["--from", "hf", "--load", "x", "--to", "megatron", "--save", "y", "--ignore-saved-args", "a", "b"])


def test_rotary_settings_that_the_script_does_not_hand_on(tmp_path: Path) -> None:
    """pretrain_gpt.py trains with a factor of 8 whatever is saved, forks with what is saved: the user has to know."""
    settings = {**MODERN, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    write_torch(tmp_path / "x", settings, random_tensors(ModelConfig(**settings)), style="core")
    for ignored, factor in (((), 32.0), (("rope_scaling_factor",), 8.0)):
        said: list[str] = []
        job = Conversion("megatron-lm", tmp_path / "x", "megatron", tmp_path / f"{factor}", ignored=ignored)
        convert(job, said.append)
        assert read_native(tmp_path / f"{factor}").model.rope_scaling_factor == factor
        warned = [line for line in said if line.startswith("warning: rope_scaling_factor is 32.0")]
        assert bool(warned) == (factor == 32.0)
        assert all(line.endswith("add --ignore-saved-args rope_scaling_factor") for line in warned)


def test_wrong_types_and_sizes_are_one_sentence(tmp_path: Path) -> None:
    """They came out as tracebacks from the middle of the proof."""
    values = random_tensors(ModelConfig(**CLASSIC))
    wrong: list[tuple[str, Any, str]] = [
        ("norm_epsilon", "1e-5", 'norm_epsilon is "1e-5"'),
        ("rotary_base", "x", 'rotary_base is "x"'),
        ("hidden_size", -3, "hidden_size is -3"),
        ("num_layers", "2", 'num_layers is "2"'),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("normalization", 5, "normalization is 5"),
        ("attention_dropout", float("nan"), "attention_dropout is NaN"),
    ]
    for name, value, fact in wrong:
        write_torch(tmp_path / name, CLASSIC, values, style="core", **{name: value})
        with expect_error(CheckpointError, fact):
            read_megatron_lm(tmp_path / name)


def test_flags_of_releases_are_known() -> None:
    """A checkpoint must not be refused for a flag of training, whatever its value."""
    flags = (REPOSITORY / "tests/golden/megatron_flags.txt").read_text().split()
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags]
    spellings = ("no_", "disable_", "bert_no_", "persistent_save_interval")  # whose arguments have other names
    positive = [name for name in names if not name.startswith(spellings)]
    assert len(positive) > 400
    assert unknown(dict.fromkeys(positive, "a value")) == {}


def test_every_name_is_in_one_table() -> None:
    """An argument in two tables would be refused or not depending on the order of questions."""
    read, without = READ.split(), WITHOUT_EFFECT.split()
    assert len({*read, *without}) == len(read) + len(without)
    prefixes = tuple(name[:-1] for name in without if name.endswith("*"))
    assert not [name for name in read if name in LIMITED or name in without or name.startswith(prefixes)]
    assert not [name for name in without if name.removesuffix("*").startswith(prefixes) and not name.endswith("*")]
    assert not limits(vars(argparse.Namespace(**dict.fromkeys(LIMITED))))
