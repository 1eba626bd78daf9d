"""The version of the package and where its code is, for modules that the package itself may open."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
CODE = Path(__file__).parent
