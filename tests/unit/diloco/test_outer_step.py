"""The outer step of one worker, whose mean is its own, against torch's optimizer; fragments of layers."""

from __future__ import annotations

import torch

from megatron.config.rules import remarks
from megatron.core.diloco.outer_step import fragment_of
from megatron.core.parallel.context import ParallelContext
from tests.harness.runs import tiny_config, tiny_run
from tests.harness.sentences import check_sentence


def test_it_is_torchs_nesterov_momentum() -> None:
    """The momentum was applied once too little: outer steps were shorter than published ones."""
    flags = "--mock-data --diloco-workers 1 --diloco-sync-interval 2 --diloco-outer-lr 0.6 --diloco-outer-momentum 0.8"
    run = tiny_run(ParallelContext.single(dtype=torch.float64), flags)
    assert run.outer is not None
    masters = list(run.optimizer.masters())
    shared = [torch.nn.Parameter(each.read().clone()) for each in masters]
    oracle = torch.optim.SGD(shared, lr=0.6, momentum=0.8, nesterov=True)
    for step in range(1, 9):
        for number, master in enumerate(masters):
            weights = master.read()
            weights.add_(torch.sin(torch.arange(len(weights), dtype=torch.float64) + step + number))
            master.write(weights)
        own = [master.read().clone() for master in masters]
        assert run.outer.after_step() == (step % 2 == 0)
        if step % 2 == 0:
            for parameter, weights in zip(shared, own):
                parameter.grad = parameter.detach() - weights
            oracle.step()
        for parameter, master, weights in zip(shared, masters, own):
            expected = parameter.detach() if step % 2 == 0 else weights
            torch.testing.assert_close(master.read(), expected, rtol=1e-14, atol=1e-14)


def test_layers_are_dealt_to_fragments_in_turn() -> None:
    """Neighbouring layers were one fragment, and tables a fragment that had most layers."""
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(5)]
    assert [fragment_of(name, 3) for name in names] == [0, 1, 2, 0, 1]
    assert fragment_of("embedding.word_embeddings.weight", 3) == 2
    assert fragment_of("decoder.final_layernorm.weight", 1) == 0


def test_remarks_name_what_is_lost() -> None:
    """The last steps of a run were one worker's alone, and nobody said so."""
    found = remarks(tiny_config("--mock-data --train-iters 10 --diloco-workers 2 --diloco-sync-interval 4", ranks=4))
    assert len(found) == 2
    for sentence in found:
        check_sentence(sentence)
