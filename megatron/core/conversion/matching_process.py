"""The process that matches regular expressions of a stranger's file: one may take longer than anybody waits.

Started as a script. Its input is JSON: ``names``, and ``patterns``, each a pair of a regular expression and whether it
matches a whole name or its beginning. Its output is JSON, too: ``found``, for each pattern the names that match, each
with what the group ``number`` holds, if there is one; or ``wrong``, the index of a pattern that is none, and why.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import warnings
from typing import Any

_MOST_MEMORY = 2 << 30


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The names that each pattern matches."""
    found = []
    for index, (pattern, is_whole) in enumerate(job["patterns"]):
        try:
            compiled = re.compile(pattern)
            match = compiled.fullmatch if is_whole else compiled.match
            matches = {name: match(name) for name in job["names"]}
        except (re.error, OverflowError, RecursionError, MemoryError) as error:
            return {"wrong": [index, str(error) or type(error).__name__]}
        found.append({name: one.groupdict().get("number") for name, one in matches.items() if one})
    return {"found": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    json.dump(main(json.load(sys.stdin)), sys.stdout)
