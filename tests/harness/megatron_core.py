"""The megatron-core package itself, in a process of its own: both packages are called megatron.

To use it: ``pip install --no-deps --target FOLDER "megatron-core==0.12.3"`` and ``MEGATRON_CORE_PATH=FOLDER``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

FOLDER = os.environ.get("MEGATRON_CORE_PATH")

ON_CPU = """
import contextlib, os, sys, types

sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, "megatron", "__init__.py"))]  # ours
psutil = types.ModuleType("psutil")
class Process:
    def __init__(self, *pid): pass
    def memory_info(self): return types.SimpleNamespace(rss=0)
    def nice(self, *value): pass
psutil.Process = Process
sys.modules["psutil"] = psutil

import torch
torch.cuda.synchronize = lambda *device: None
torch.cuda.current_device = lambda: "cpu"
torch.Tensor.cuda = lambda self, *device, **how: self
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
"""
"""megatron-core 0.12 expects a GPU, psutil and an older torch; on a CPU none of the three changes what it computes."""


def run_megatron_core(script: str, **values: Any) -> Any:
    """What ``script`` gives to ``answer()``; ``values`` are its variables."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    report = "import json\ndef answer(value): print('ANSWER' + json.dumps(value))\n"
    ran = subprocess.run(
        [sys.executable, "-c", given + report + ON_CPU + textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore"},
        cwd=str(FOLDER),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.rsplit("ANSWER", 1)[1])
