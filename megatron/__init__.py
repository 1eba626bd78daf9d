"""Pretrain language models with Megatron-LM's command line, on one core or many GPU nodes.

``megatron.config`` holds settings, whose fields are the flags; it needs neither torch nor numpy. ``megatron.core`` is a
library of parallel layers, data sets, optimizers and checkpoints. ``megatron.training`` runs them. ``megatron.errors``
are the exceptions meant for users. Commands are ``pretrain_gpt.py`` and its like, ``tools`` and ``tasks``.

The distribution is called pretrain-megatron. NVIDIA's megatron-core uses the same package name, so the two can't be
installed into one folder.
"""

import os as _os

__version__ = "0.1.0"

_here = _os.path.dirname(__file__)
if _os.path.exists(_os.path.join(_here, "core", "package_info.py")):  # which only megatron-core has
    raise ImportError(
        f"{_here} holds both pretrain-megatron and megatron-core ({_os.path.join(_here, 'core', 'package_info.py')}): "
        "install one of them into another environment, or start the programs of a checkout, which use its own package"
    )
