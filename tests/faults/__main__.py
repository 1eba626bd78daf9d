"""``python -m tests.faults [NAMES or NUMBERS]``: does the default tier notice faults in real code?"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.faults.catalogue import FAULTS, SURVIVORS
from tests.faults.copy_of_checkout import CheckoutCopy
from tests.faults.fault import Fault
from tests.faults.judge import judge, sound
from tests.faults.record import UNFINISHED, Verdict, read_record, record_verdict, without_verdict

NEEDED = 0.95


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names or numbers (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are judged at once, each in its own copy")
    parser.add_argument("--minutes", type=float, default=15, help="time for one fault")
    parser.add_argument("--missing", action="store_true", help="judge those without a verdict, after an interruption")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the tests that caught faults on the sound code, and judge those faults again whose test fails or has "
        "left the default tier",
    )
    parser.add_argument("--list", action="store_true", help="print the faults and what is known of them; run nothing")
    return parser.parse_args()


def chosen(words: Iterable[str]) -> list[Fault]:
    """The faults of these names and numbers; all of them without words."""
    numbered = {str(number): fault for number, fault in enumerate(FAULTS, 1)} | {each.name: each for each in FAULTS}
    words = list(words)
    unknown = [word for word in words if word not in numbered]
    if unknown:
        sys.exit(f"no fault is called {unknown[0]}; python -m tests.faults --list prints the names")
    return [numbered[word] for word in words] if words else list(FAULTS)


def judge_all(
    faults: Sequence[Fault], record: Mapping[str, Verdict], *, jobs: int, limit: float, again: bool = True
) -> None:
    """Judge faults, each in a copy of its own, and record every verdict as soon as it is known.

    Without ``again``, faults that another process has judged meanwhile are skipped.
    """
    stop, copies = threading.Event(), SimpleQueue[CheckoutCopy]()

    def one(fault: Fault) -> None:
        if not again and not without_verdict([fault], read_record()):
            return
        copy = copies.get()
        try:
            earlier = record.get(fault.name)
            verdict = judge(copy, fault, told=earlier.test if earlier else "", limit=limit)
        finally:
            copies.put(copy)
        record_verdict(fault, verdict)
        print(line(fault, verdict), flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(min(jobs, len(faults))):
            copies.put(copy_of_its_own(Path(folder, str(number)), stop))
        try:
            list(pool.map(one, faults))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def copy_of_its_own(folder: Path, stop: threading.Event | None = None) -> CheckoutCopy:
    """A copy of the checkout from which programs import; the process ends if they would import another one."""
    copy = CheckoutCopy(folder, stop=stop)
    imported = copy.imported_from()
    if not Path(imported).is_relative_to(copy.root):
        sys.exit(f"programs in the copy {copy.root} import {imported}, so that no fault would be noticed")
    return copy


def no_longer_sound(faults: list[Fault], record: Mapping[str, Verdict], *, limit: float) -> list[Fault]:
    """Faults whose test is not in the default tier any more, or fails without the fault too."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        told = {fault.name: record[fault.name].test for fault in faults if record[fault.name].red}
        good = sound(copy_of_its_own(Path(folder)), sorted(set(told.values())), limit=limit)
    return [fault for fault in faults if fault.name in told and told[fault.name] not in good]


def line(fault: Fault, verdict: Verdict | None) -> str:
    """A row of the table."""
    number = FAULTS.index(fault) + 1
    if verdict is None:
        return f"{number:4} {fault.name:44} not judged"
    mark = "red" if verdict.red else "SURVIVED" if verdict.how != UNFINISHED else "no time"
    return f"{number:4} {fault.name:44} {mark:9} {verdict.seconds:6.1f} s  {verdict.how:8} {verdict.test}"


def main() -> None:
    """Judge faults and print the table, its totals and the share."""
    given = arguments()
    faults, record = chosen(given.faults), read_record()
    limit = given.minutes * 60
    missing = without_verdict(faults, record)
    if given.list:
        wanted = list[Fault]()
    elif given.check:
        wanted = missing + no_longer_sound([each for each in faults if each not in missing], record, limit=limit)
    else:
        wanted = missing if given.missing else faults
    judge_all(wanted, record, jobs=given.jobs, limit=limit, again=not given.missing)
    sys.exit(0 if report(faults, read_record()) or given.list else 1)


def report(faults: Sequence[Fault], record: Mapping[str, Verdict]) -> bool:
    """Print the table, its totals and the share of red ones; whether enough are red, and the others explained."""
    unjudged = without_verdict(faults, record)
    judged = [fault for fault in faults if fault not in unjudged]
    print("\n".join(line(fault, None if fault in unjudged else record[fault.name]) for fault in faults))
    survivors = [fault.name for fault in judged if not record[fault.name].red]
    red = len(judged) - len(survivors)
    share = red / max(1, len(judged))
    print(f"{red} of {len(judged)} faults turned the default tier red ({share:.1%}); {len(unjudged)} are not judged")
    for name in survivors:
        print(f"survived: {name}: {SURVIVORS.get(name, 'no reason is recorded')}")
    return share >= NEEDED and all(name in SURVIVORS for name in survivors)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also for a shell's background job, which ignores the first
        signal.signal(number, lambda *_: sys.exit("interrupted: --missing goes on with those that are not judged"))
    main()
