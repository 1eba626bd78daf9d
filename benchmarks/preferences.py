"""CPU time of a DPO step beside the same step on transformers' Llama as trl takes it.

    python -m benchmarks.preferences [--rounds N]

The peer computes what trl's DPOTrainer does with precomputed log-probabilities of the initial model: chosen and
rejected texts of a batch one below the other, padded, logits of all positions, and AdamW. Both read the same pairs and
take turns. Seconds are of the processor on one thread.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.training.evaluation.first_pass import before_training
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step

GPT, BETA, PAIRS = FAMILIES["gpt"], 0.1, 4


def our_run(hidden: int, layers: int, length: int, vocabulary: int) -> Run:
    """A Llama that is trained on mock pairs of up to ``length`` tokens."""
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {4 * hidden} "
        f"--num-attention-heads {hidden // 32} --position-embedding-type rope --swiglu --normalization RMSNorm "
        f"--disable-bias-linear --seq-length {length} "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 4096 "
        f"--mock-data --tokenizer-type NullTokenizer --vocab-size {vocabulary - 1} --num-workers 0 --eval-iters 0 "
        f"--micro-batch-size {PAIRS} --global-batch-size {PAIRS} --train-iters 100 --lr 1e-5 --load unread --dry-run "
        f"--preference-loss dpo --preference-beta {BETA}"
    )
    run = build_run(parse_run(flags.split(), extra_groups=GPT.groups), GPT.train_spec, ParallelContext.single())
    before_training(run)
    return run


class Peer:
    """transformers' Llama of the same sizes, and its optimizer."""

    def __init__(self, run: Run, vocabulary: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = run.config.model
        self._model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=model.hidden_size,
                intermediate_size=4 * model.hidden_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_attention_heads,
            )
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)

    def step(self, batch: Microbatch) -> None:
        """A step on the pairs of a batch."""
        tensors = batch.tensors
        texts, masks = list[Tensor](), list[Tensor]()
        for side in (0, 1):
            for row in range(PAIRS):
                here = tensors["document_ids"][row] == side
                texts.append(torch.cat([tensors["tokens"][row][here], tensors["labels"][row][here][-1:]]))
                masks.append(tensors["answer"][row][here] > 0)
        ids, answer = (pad_sequence(each, batch_first=True) for each in (texts, masks))
        lengths = torch.tensor([len(text) for text in texts]).unsqueeze(1)
        logits = self._model(input_ids=ids, attention_mask=torch.arange(ids.shape[1]) < lengths).logits[:, :-1]
        each = logits.log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
        ratios = (each * answer).sum(1) - tensors["reference_scores"].t().flatten()
        chosen, rejected = ratios.chunk(2)
        (-logsigmoid(BETA * (chosen - rejected))).mean().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the processor."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Take steps in turns and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=512, help="tokens of the longest pair")
    parser.add_argument("--vocabulary", type=int, default=32000)
    options = results.parse(parser, argv, rounds=1, hidden=64, layers=2, length=64, vocabulary=1000)
    torch.set_num_threads(1)
    run = our_run(options.hidden, options.layers, options.length, options.vocabulary)
    peer, batches, found = (
        Peer(run, options.vocabulary),
        run.data.training_batches(0),
        defaultdict[str, list[float]](list),
    )
    for number in range(options.rounds + 1):
        batch = next(batches)
        ours, theirs = seconds_of(partial(train_step, run, batch)), seconds_of(partial(peer.step, batch[0]))
        if number:  # the first warms up
            found["ours"].append(ours)
            found["transformers, as trl"].append(theirs)
    middle = {name: statistics.median(each) for name, each in found.items()}
    print("| | ms of the processor a step |\n|---|--:|")
    for name, seconds in middle.items():
        print(f"| {name} | {1000 * seconds:.0f} |")
    results.save(options, {"DPO step": middle["transformers, as trl"] / middle["ours"]})


if __name__ == "__main__":
    main()
