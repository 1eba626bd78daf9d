"""Importing this module takes everything that is loaded by then out of the garbage collector's work.

The server of ranks imports it last. A process that is forked from it would else write to each object of torch at its
first collection, and so copy most of the server's memory, which takes more time than most of what tests do there.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
