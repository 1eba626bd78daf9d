"""What ZeRO 2 and 3 hold, and when: memory that is free between uses, and nothing stale after weights were loaded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megatron.core.distributed.levels import Levels
from megatron.core.parallel.collectives import reduce_scatter_into_async
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ParallelError
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.run.agreement import check_replicas_agree
from megatron.training.run.run import Run
from megatron.training.run.stages import named_parameters
from megatron.training.step import forward_backward, train_step
from tests.harness import run_ranks
from tests.harness.runs import tiny_run

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
DATA = "--mock-data --tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0"
LARGER = (
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 256 --micro-batch-size 1 --seq-length 8 --global-batch-size 4 "
    "--bf16"
)


def sharded_run(context: ParallelContext, stage: str, flags: str = "") -> Run:
    """A tiny run of a stage on this rank."""
    return tiny_run(context, f"{DATA} --data-parallel-sharding-strategy {stage} {flags}")


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors that operators have returned since it was entered, and the most at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = dict[int, int]()
        self._total = self.highest = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor):
                self._note(each.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._set, key, 0, forget=True)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int, *, forget: bool = False) -> None:
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        if forget:
            del self._sizes[key]
        self.highest = max(self.highest, self._total)

    @contextmanager
    def watching(self) -> Iterator[LiveMemory]:
        """Also see storage that changes its size, which no operator does."""
        resize = UntypedStorage.resize_

        def resized(storage: UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._note(storage)
            return found

        with mock.patch.object(UntypedStorage, "resize_", resized), self:
            yield self


def peaks(context: ParallelContext) -> dict[str, int]:
    """The most bytes of a run of each stage, in its first step."""
    found = {}
    for stage in STAGES:
        with LiveMemory().watching() as memory:
            run = sharded_run(context, stage, LARGER)
            batches = run.data.training_batches(0)
            memory.highest = 0
            train_step(run, next(batches))
        found[stage] = memory.highest
        del run
    return found


def test_each_stage_needs_less_memory_than_the_one_before() -> None:
    """Another trainer's ZeRO 2 needed more than ZeRO 1: gradients of a whole model existed at once."""
    for found in run_ranks(peaks, dp=4, timeout=120):
        assert found["no_shard"] > found["optim"] > found["optim_grads"] > found["optim_grads_params"], found
        # Of eight layers: bf16 weights of all and of one or two, fp32 gradients of all and of two; a quarter of those.
        assert found["optim_grads"] < 0.75 * found["optim"]
        assert found["optim_grads_params"] < 0.75 * found["optim_grads"]


def bytes_of_weights(run: Run) -> dict[str, int]:
    return {name: each.untyped_storage().nbytes() for name, each in named_parameters(run.models)}


def weights_between_passes(context: ParallelContext) -> tuple[str, list[Mapping[str, int]]]:
    """The error of a weight that is read after a step; bytes of weights at the start, after a step, made whole, after a
    comparison of replicas and the next step, and after evaluation.
    """
    run = sharded_run(context, "optim_grads_params", "--eval-iters 1 --split 8,2,0")
    batches, found = run.data.training_batches(0), [bytes_of_weights(run)]
    train_step(run, next(batches))
    found.append(bytes_of_weights(run))
    weight = run.models[0].get_parameter("decoder.layers.1.mlp.linear_fc1.weight")
    assert weight.shape == (64, 16) and weight.dtype == context.dtype, "facts stay readable"
    with pytest.raises(ParallelError) as error:
        weight * 2
    run.optimizer.gather.make_whole()
    found.append(bytes_of_weights(run))
    check_replicas_agree(run.whole_model_state(), context, iteration=1)
    train_step(run, next(batches))
    found.append(bytes_of_weights(run))
    evaluate(run, run.data.evaluation_batches("valid", evaluation=0))
    return str(error.value), [*found, bytes_of_weights(run)]


def test_released_weights_have_no_memory() -> None:
    """Weights that stay whole by accident cost the memory that ZeRO 3 is for, and torch reads freed ones in silence.

    Comparing replicas ended the run in the next step: memory that numpy has seen can't be resized.
    """
    for error, (first, stepped, whole, again, evaluated) in run_ranks(weights_between_passes, dp=2):
        assert "decoder.layers.1" in error and "decoder.layers.1.mlp.linear_fc1.weight" in error
        for released in (first, stepped, again, evaluated):
            assert set(released.values()) == {0}
        assert 0 not in whole.values()


def losses_around_a_load(
    context: ParallelContext, folder: Path, stage: str, precision: str = "", gathering: str = ""
) -> tuple[float, float, float]:
    """The loss of a trained model; of another one, evaluated and then loaded with it; and that one's Adam step."""

    def loss(run: Run) -> float:
        return evaluate(run, trained.data.evaluation_batches("valid", evaluation=0)).means["lm loss"]

    flags = f"--eval-iters 1 --split 8,2,0 --pipeline-model-parallel-size {context.mesh.size('pp')} {precision}"
    trained = sharded_run(context, "optim", f"{flags} --save {folder}")
    batches = trained.data.training_batches(0)
    for _ in range(2):
        train_step(trained, next(batches))
    Saver(trained).save()
    other = sharded_run(context, stage, f"{flags} --load {folder} --seed 99 {gathering}")
    before = loss(other)
    load(other)
    expected, found = loss(trained), loss(other)
    assert abs(before - expected) > 1e-6, "another seed is another model"
    return expected, found, other.optimizer.state_dict()["step"]


@pytest.mark.parametrize(("stage", "pp"), [*((stage, 1) for stage in STAGES[1:]), (STAGES[3], 2)])
def test_loaded_weights_take_effect_at_once(stage: str, pp: int, tmp_path: Path) -> None:
    """In another trainer loaded weights took effect after the first step: copies had been gathered before."""
    for expected, found, step in run_ranks(losses_around_a_load, tmp_path, stage, dp=2, pp=pp, dtype=torch.float64):
        assert found == pytest.approx(expected, abs=1e-9) and step == 2


def test_loaded_weights_in_8_bits_take_effect_at_once(tmp_path: Path) -> None:
    """Codes that were made for an evaluation before loading would be those of other weights."""
    given = tmp_path, STAGES[3], "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "--fp8-param-gather"
    for expected, found, step in run_ranks(losses_around_a_load, *given, dp=2, dtype=torch.bfloat16):
        assert found == pytest.approx(expected, abs=1e-9) and step == 2


def first_updates(context: ParallelContext, stage: str) -> list[float]:
    """The largest change of a weight in the first step, after an evaluation and a pass without an update."""
    run = sharded_run(context, stage, "--eval-iters 1 --split 8,2,0 --weight-decay 0 --clip-grad 0")
    run.optimizer.gather.make_whole()
    before = {name: each.detach().clone() for name, each in named_parameters(run.models)}
    evaluate(run, run.data.evaluation_batches("valid", evaluation=0))
    batches = run.data.training_batches(0)
    forward_backward(run, next(batches))
    assert run.schedule is not None
    with mock.patch.object(type(run.schedule), "learning_rate", return_value=1e-2):
        train_step(run, next(batches))
    run.optimizer.gather.make_whole()
    return [float((each.detach() - before[name]).abs().max()) for name, each in named_parameters(run.models)]


@pytest.mark.parametrize("stage", STAGES[2:])
def test_first_update_is_as_large_as_the_rate(stage: str) -> None:
    """In another trainer a pass that made state counted as a step of Adam: first updates were 1.3 times too small."""
    for moved in run_ranks(first_updates, stage, dp=2, dtype=torch.float64):
        assert max(moved) == pytest.approx(1e-2, rel=1e-3)


def layers_in_memory(context: ParallelContext, flags: str) -> dict[str, list[set[int]]]:
    """Layers whose weights are whole while each layer is computed, and while its gradients are, in a step."""
    run = sharded_run(context, "optim_grads_params", f"--num-layers 4 --global-batch-size 4 {flags}")
    layers = [*run.models[0].get_submodule("decoder.layers").children()]
    seen: dict[str, list[set[int]]] = {"forward": [], "backward": []}

    def note(direction: str) -> None:
        whole = {
            number
            for number, layer in enumerate(layers)
            if all(each.untyped_storage().nbytes() for each in layer.parameters())
        }
        seen[direction].append(whole)

    def inside(module: Any, inputs: Any, output: Tensor) -> None:
        note("forward")
        if output.requires_grad:  # unless it will be computed again
            output.register_hook(lambda grad: note("backward"))  # type: ignore[no-untyped-call]

    for layer in layers:
        layer.get_submodule("mlp").register_forward_hook(inside)
    train_step(run, next(run.data.training_batches(0)))
    return seen


def test_one_layer_is_gathered_before_it_is_needed() -> None:
    """A gather that starts when its weights are needed hides behind nothing; many ahead take the memory of all."""
    alone = [{0}, {1}, {2}, {3}]
    for seen in run_ranks(layers_in_memory, "", dp=2):
        assert seen == {"forward": alone, "backward": alone[::-1]}
    for seen in run_ranks(layers_in_memory, "--overlap-grad-reduce --overlap-param-gather", dp=2):
        assert seen["forward"] == [{0, 1}, {1, 2}, {2, 3}, {3}]
        assert seen["backward"] == [{2, 3}, {1, 2}, {0, 1}, {0}]


def outside_in_memory(context: ParallelContext, flags: str) -> dict[str, set[str]]:
    """Units outside of layers whose weights or gradients the first of two layers finds whole, in passes of a step."""
    alone = "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 4"
    run = sharded_run(context, "optim_grads_params", f"{alone} {flags}")
    (model,), seen = run.models, dict[str, set[str]]()

    def note(when: str) -> None:
        buckets = [bucket for buffer in run.buffers for bucket in buffer.buckets]
        for kind in ("weights", "grads", "grad_sums"):
            names = {each.entries[0].name for each in buckets if getattr(each, kind).is_allocated}
            seen[f"{kind}, {when}"] = {name.rpartition(".")[0] for name in names if "layers." not in name}

    def inside(module: Any, inputs: Any, output: Tensor) -> None:
        note("forward")
        output.register_hook(lambda grad: note("backward"))  # type: ignore[no-untyped-call]

    model.get_submodule("decoder.layers.0.mlp").register_forward_hook(inside)
    train_step(run, next(run.data.training_batches(0)))
    return seen


def test_embedding_and_head_are_whole_while_they_are_used() -> None:
    """They are the largest units of a small model with many words, and were whole during whole passes, in memory that
    gradients of layers need. Sums of gradients lay beside all activations, before there were any.
    """
    words, head, norm = "embedding.word_embeddings", "output_layer", "decoder.final_layernorm"
    for seen in run_ranks(outside_in_memory, "--untie-embeddings-and-output-weights", dp=2):
        assert not any(seen[f"{kind}, forward"] for kind in ("weights", "grads", "grad_sums")), seen
        assert not seen["weights, backward"] and not seen["grads, backward"], seen
        assert seen["grad_sums, backward"] == {norm, head}
    for seen in run_ranks(outside_in_memory, "", dp=2):
        assert not seen["weights, forward"] and not seen["weights, backward"]
        assert seen["grads, backward"] == {words} and seen["grad_sums, backward"] == {norm}


def test_layers_that_are_computed_again_are_whole_together() -> None:
    """The memory estimate of ZeRO 3 with recomputed runs of layers counts all layers of a run."""
    recomputed = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
    for number in (1, 2):
        found = run_ranks(layers_in_memory, f"{recomputed} {number}", dp=2)
        assert max(len(whole) for seen in found for whole in seen["forward"]) == number


def sums_in_order(context: ParallelContext, flags: str) -> list[str]:
    """The sums of gradients of a step of two microbatches, inside of copies and over them, as they begin."""
    run, seen = sharded_run(context, "optim_grads_params", f"--num-layers 4 --global-batch-size 8 {flags}"), list[str]()

    def noted(name: str, begin: Any) -> Any:
        def begin_noted(*args: Any, **more: Any) -> Any:
            seen.append(name)
            return begin(*args, **more)

        return begin_noted

    inside = "megatron.core.distributed.unit_memory.reduce_scatter_into_async"
    with (
        mock.patch(inside, noted("inside", reduce_scatter_into_async)),
        mock.patch.object(Levels, "start_sum", noted("over", Levels.start_sum)),
    ):
        train_step(run, next(run.data.training_batches(0)))
    return seen


def test_sums_over_copies_hide_behind_the_backward_pass() -> None:
    """They came at the end of a step, when nothing is computed that a slow network between nodes could hide behind."""
    flags = "--num-distributed-optimizer-instances 2 --micro-batch-size 1"
    for seen in run_ranks(sums_in_order, flags, dp=4, copies=2):
        count = seen.count("over")
        assert seen == [*["inside"] * 2 * count, *["over"] * count], "after all reductions of both microbatches"
    for seen in run_ranks(sums_in_order, f"{flags} --overlap-grad-reduce", dp=4, copies=2):
        assert seen.count("over") == count and seen.count("inside") == 2 * count
        assert "over" not in seen[: count + 2], "sums of the first microbatch aren't whole"
        last = len(seen) - seen[::-1].index("inside")
        assert seen[:last].count("over") >= count - 4, seen
