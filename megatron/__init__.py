"""Pretrain language models with Megatron-LM's command line, on one core or many GPU nodes.

In Python, ``megatron.from_transformers`` and ``megatron.load`` give a model that generates text and saves itself, and
``megatron.pretrain`` trains a family of models by its flags, or a module and data set of your own.

``megatron.config`` holds settings, whose fields are the flags; it needs neither torch nor numpy. ``megatron.core`` is a
library of parallel layers, data sets, optimizers and checkpoints. ``megatron.training`` runs them. ``megatron.errors``
are the exceptions meant for users. Commands are ``pretrain_gpt.py`` and its like, ``tools`` and ``tasks``.

The distribution is called pretrain-megatron. NVIDIA's megatron-core uses the same package name, so the two can't be
installed into one folder.
"""

import os as _os
from typing import TYPE_CHECKING

from megatron.version import __version__ as __version__

if TYPE_CHECKING:  # what __getattr__ imports at first use, as that takes torch
    from megatron.library.language_model import LanguageModel as LanguageModel
    from megatron.library.opening import from_transformers as from_transformers
    from megatron.library.opening import load as load
    from megatron.library.pretraining import pretrain as pretrain

_LAZY = {
    "LanguageModel": "megatron.library.language_model",
    "from_transformers": "megatron.library.opening",
    "load": "megatron.library.opening",
    "pretrain": "megatron.library.pretraining",
}

_here = _os.path.dirname(__file__)
if _os.path.exists(_os.path.join(_here, "core", "package_info.py")):  # which only megatron-core has
    raise ImportError(
        f"{_here} holds both pretrain-megatron and megatron-core ({_os.path.join(_here, 'core', 'package_info.py')}): "
        "install one of them into another environment, or start the programs of a checkout, which use its own package"
    )


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY} - {"TYPE_CHECKING"})
