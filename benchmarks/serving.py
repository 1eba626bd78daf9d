"""The server against its engine, one client against many, and what equal beginnings of prompts save, on the CPU.

    python -m benchmarks.serving --dtype bf16
    python -m benchmarks.serving --rounds 9
    python -m benchmarks.serving --quick

The engine in this process and the same engine behind the HTTP server, which is a process of its own, take turns with
random prompts, each time new ones, and greedy texts of one length. Clients are threads of a third process. Printed are
tokens a second by the clock; processor time a token of the engine's process, in which other work on the machine hardly
counts, and of the HTTP server's; and the model's steps, of which prompts that arrive one by one take a few more.
Ratios are to the engine alone, the median of all rounds with a 95 % interval: what HTTP adds. Then: time to the first
token and between tokens, one client after the other and all at once; and time to the first token of prompts with a
beginning that was read before.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import http.client
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.against_commit import interval
from benchmarks.generation import DTYPES, Prompts, Shape, build, runner_of
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.model import GPTModel
from megatron.core.tokenizers.null import NullTokenizer
from megatron.serving.http_process import END
from megatron.serving.model import ServedModel
from megatron.serving.serve import bound_socket, start
from megatron.serving.settings import ServerConfig


@dataclass(frozen=True)
class Times:
    """Seconds: of all requests together, and of each to its first token and from one token to the next."""

    whole: float
    first: list[float]
    between: list[float]


@dataclass(frozen=True)
class Asking:
    """What the process of clients does: ask for ``count`` tokens after each prompt, ``clients`` at a time."""

    port: int
    prompts: Prompts
    count: int
    clients: int
    stream: bool = True

    def times(self) -> Times:
        """Ask, in the process that calls it."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self.clients) as threads:
            found = list(threads.map(self._ask, self.prompts))
        whole = time.perf_counter() - began
        between = [later - earlier for _, at in found for earlier, later in pairwise(at)]
        return Times(whole, [at[0] - sent for sent, at in found], between)

    def _ask(self, prompt: list[int]) -> tuple[float, list[float]]:
        """When the request was sent, and when each part of its answer came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        fields = {"prompt": prompt, "max_tokens": self.count, "temperature": 0, "ignore_eos": True}
        sent, at = time.perf_counter(), list[float]()
        body = json.dumps({**fields, "stream": self.stream})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        if self.stream:
            for line in answer:
                if line.startswith(b"data: {"):
                    at.append(time.perf_counter())
        else:
            answer.read()
            at.append(time.perf_counter())
        connection.close()
        return sent, at


@dataclass
class Turns:
    """What a contender's turns took: seconds by the clock, processor time of the engine's process and of the HTTP
    server's, and steps of the model.
    """

    clock: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


def engine_of(model: GPTModel, shape: Shape, *, requests: int) -> Engine:
    """An engine with room for as many whole texts."""
    return Engine(runner_of(model, shape, requests=requests), tokenizer=NullTokenizer(shape.vocabulary - 1))


def in_process(engine: Engine, prompts: Prompts, count: int) -> float:
    """Seconds that the engine takes without a server. It gets one prompt first and, after a step, the others: as from
    clients, whose texts are not all of one length at each step, which would be computed faster.
    """
    first, *others = [
        Request(id=str(number), prompt=tuple(prompt), max_tokens=count, sampling=Sampling(temperature=0.0))
        for number, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    engine.submit(first)
    engine.step()
    for request in others:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


@contextmanager
def served(engine: Engine, tokenizer: NullTokenizer) -> Iterator[tuple[int, int]]:
    """Port and process id of an HTTP server for ``engine``, which runs in a thread of this process."""
    model = ServedModel(
        name="model", tokenizer=tokenizer, max_length=engine.limits.max_length, fingerprint="", end_ids=frozenset()
    )
    config = ServerConfig(port=0, no_access_log=True)
    listener = bound_socket(config)
    port: int = listener.getsockname()[1]
    running = start(engine, model, config, listener)
    http = running.http
    assert http.pid is not None, "it has started"
    try:
        while http.is_alive():
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.01)
        yield port, http.pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(http.pid, END)
        http.join()
        running.loop.join()


def compare(
    contenders: dict[str, Callable[[Prompts], float]],
    new: Callable[[], Prompts],
    *,
    rounds: int,
    engines: Sequence[Engine],
    http: int,
) -> dict[str, Turns]:
    """Each contender in each round, with new prompts, after a round that does not count. ``http``: process id."""
    turns = {name: Turns() for name in contenders}
    for number in range(rounds + 1):
        for name, contender in list(contenders.items())[:: 1 if number % 2 else -1]:
            prompts = new()
            before, http_before = time.process_time(), processor_seconds(http)
            steps_before = sum(engine.statistics.steps for engine in engines)
            seconds = contender(prompts)
            spent, http_spent = time.process_time() - before, processor_seconds(http) - http_before
            if number:
                turns[name].clock.append(seconds)
                turns[name].engine.append(spent)
                turns[name].http.append(http_spent)
                turns[name].steps.append(sum(engine.statistics.steps for engine in engines) - steps_before)
    return turns


def processor_seconds(process: int) -> float:
    """Processor time that a process has taken (proc(5), stat)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(turns: dict[str, Turns], tokens: int) -> dict[str, float]:
    """A table; ratios are of a round's turns to that of the engine alone, by median. Returns those by the clock."""
    ratios = {}
    first, *_ = turns.values()
    ratio = f"{'ratio':>7}{'interval':>16}"
    print(f"  {'':<20}{'tokens/s':>9}{ratio}{'engine ms':>11}{ratio}{'HTTP ms':>9}{'steps':>7}")
    for name, each in turns.items():
        said = f"  {name:<20}{tokens / statistics.median(each.clock):>9.0f}{compared(each.clock, first.clock)}"
        said += f"{1e3 * statistics.median(each.engine) / tokens:>11.3f}{compared(each.engine, first.engine)}"
        said += f"{1e3 * statistics.median(each.http) / tokens:>9.3f}{statistics.median(each.steps):>7.0f}"
        print(said)
        if each is not first:
            ratios[name] = statistics.median(mine / alone for mine, alone in zip(each.clock, first.clock))
    return ratios


def compared(mine: Sequence[float], first: Sequence[float]) -> str:
    """Median ratio of a round's turns and its 95 % interval."""
    ratios = [one / other for one, other in zip(mine, first)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):>7.3f}{f'{low:.3f} to {high:.3f}' if mine is not first else '':>16}"


def show(name: str, times: Sequence[Times], tokens: int) -> None:
    """A line of latencies: median and 90th percentile, in ms."""

    def said(values: list[float]) -> str:
        ordered = sorted(values)
        return f"{1e3 * statistics.median(ordered):>9.1f}{1e3 * ordered[len(ordered) * 9 // 10]:>9.1f}"

    first = [each for found in times for each in found.first]
    between = [each for found in times for each in found.between]
    rate = tokens / statistics.median(found.whole for found in times)
    print(f"  {name:<28}{rate:>9.0f}{said(first)}{said(between)}")


def main() -> None:
    """Print tables."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--clients", type=int, default=16, help="at once (default 16)")
    parser.add_argument("--length", type=int, default=64, help="of prompts (default 64)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones for each prompt (default 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = results.parse(parser, length=8, tokens=4, rounds=1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    shape = Shape(2, 64, 4, 512, 256) if options.quick else Shape()
    length, count, rounds = options.length, options.tokens, options.rounds
    clients, tokens = options.clients, options.clients * count
    model = build(shape, DTYPES[options.dtype])
    alone, inside = (engine_of(model, shape, requests=clients) for _ in range(2))
    seeds = iter(range(1_000_000))

    def new() -> Prompts:
        return [prompt_of(next(seeds), length, shape) for _ in range(clients)]

    context = multiprocessing.get_context("spawn")
    tokenizer = NullTokenizer(shape.vocabulary - 1)
    with served(inside, tokenizer) as (port, http), ProcessPoolExecutor(1, context) as others:

        def asked(prompts: Prompts, *, at_once: int = clients, new_tokens: int = count, stream: bool = True) -> Times:
            return others.submit(Asking(port, prompts, new_tokens, at_once, stream).times).result()

        print(
            f"{options.dtype}, {clients} prompts of {length} tokens, {count} new ones each, {options.threads} threads"
        )
        contenders: dict[str, Callable[[Prompts], float]] = {
            "engine in process": lambda prompts: in_process(alone, prompts, count),
            "HTTP, whole answers": lambda prompts: asked(prompts, stream=False).whole,
            "HTTP, streams": lambda prompts: asked(prompts).whole,
        }
        ratios = report(compare(contenders, new, rounds=rounds, engines=(alone, inside), http=http), tokens)
        print(f"  {'':<28}{'tokens/s':>9}{'first ms':>9}{'p90':>9}{'between':>9}{'p90':>9}")
        few = -(-clients // 4)
        found = [(asked(new()[:few], at_once=1), asked(new())) for _ in range(-(-rounds // 2))]
        show("one client after the other", [one for one, _ in found], few * count)
        show(f"{clients} clients at once", [many for _, many in found], tokens)
        beginning = prompt_of(next(seeds), 8 * length, shape)
        shared = [[*beginning, *prompt_of(next(seeds), length, shape)] for _ in range(1 + rounds * 2)]
        others_own = [prompt_of(next(seeds), 9 * length, shape) for _ in range(1 + rounds * 2)]
        print(
            f"first token after {9 * length} tokens, of which {8 * length} were read before, and after as many new ones"
        )
        pairs = [(asked([one], new_tokens=1), asked([other], new_tokens=1)) for one, other in zip(shared, others_own)][
            1:
        ]
        known, unknown = ([pair[which].first[0] for pair in pairs] for which in range(2))
        ratio = statistics.median(own / mine for mine, own in zip(known, unknown))
        medians = [1e3 * statistics.median(each) for each in (known, unknown)]
        print(f"  {medians[0]:.1f} ms and {medians[1]:.1f} ms: {ratio:.1f} times")
    results.save(options, ratios)


def prompt_of(seed: int, length: int, shape: Shape) -> list[int]:
    """A prompt of ``length`` random ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(shape.vocabulary, (length,), generator=generator).tolist()
    return ids


if __name__ == "__main__":
    main()
