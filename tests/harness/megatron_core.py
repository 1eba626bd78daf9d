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


def run_megatron_core(script: str, **values: Any) -> Any:
    """What ``script`` gives to ``answer()``; ``values`` are its variables."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    report = "import json\ndef answer(value): print('ANSWER' + json.dumps(value))\n"
    ran = subprocess.run(
        [sys.executable, "-c", given + report + textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(FOLDER), "PYTHONWARNINGS": "ignore"},
        cwd=str(FOLDER),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.rsplit("ANSWER", 1)[1])
