"""The gated delta rule: every form against the recurrence, and that against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops.attention.flash import imported
from megatron.core.ops.delta_rule import chunked, fla, recurrent
from megatron.core.ops.delta_rule.backends import EVERYWHERE, Backend, choose
from megatron.core.ops.delta_rule.request import DeltaInputs, DeltaOptions
from megatron.core.ops.delta_rule.state_passing import slice_map
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

NAMES = ("q", "k", "v", "log_decay", "beta")


def drawn(length: int, *, with_documents: bool = False, seed: int = 0) -> tuple[DeltaInputs, Tensor]:
    """Two sequences with two key heads, four value heads and unequal widths, and a state before them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    documents = ((uniform(2, length) < 0.2).cumsum(1) % 3) if with_documents else None
    inputs = DeltaInputs(
        q=normal(2, length, 2, 5),
        k=normal(2, length, 2, 5),
        v=normal(2, length, 4, 3),
        log_decay=-2 * uniform(2, length, 4),
        beta=2 * uniform(2, length, 4),
        document_ids=documents,
    )
    return inputs, normal(2, 4, 5, 3)


def sliced(inputs: DeltaInputs, start: int, stop: int | None) -> DeltaInputs:
    """A part of every sequence."""
    parts = {name: getattr(inputs, name)[:, start:stop] for name in NAMES}
    documents = inputs.document_ids
    return DeltaInputs(**parts, document_ids=None if documents is None else documents[:, start:stop])


def with_gradients(apply: Any, inputs: DeltaInputs, options: DeltaOptions, state: Tensor) -> dict[str, Tensor]:
    """Results and final state, and the gradients of all inputs for gradients drawn for both."""
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in NAMES}
    before = state.clone().requires_grad_()
    out, final = apply(dataclasses.replace(inputs, **leaves), options, before)
    generator = torch.Generator().manual_seed(9)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in (out, final)]
    ((out * grads[0]).sum() + (final * grads[1]).sum()).backward()
    of_leaves = {f"gradient of {name}": leaf.grad for name, leaf in (*leaves.items(), ("state", before))}
    return {"out": out.detach(), "final": final.detach(), **{name: x for name, x in of_leaves.items() if x is not None}}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *, atol: float = 1e-12) -> None:
    """Same results by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(found[name]).all(), name
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=atol, msg=name)


@pytest.mark.parametrize("backend", EVERYWHERE.values(), ids=EVERYWHERE)
def test_numbers_worked_out_by_hand(backend: Backend) -> None:
    """Three tokens of one head, two channels each."""
    rows = {
        "q": [[1, 0], [0, 1], [0.6, 0.8]],
        "k": [[1, 0], [0.6, 0.8], [0, 1]],
        "v": [[1, 2], [3, -1], [0.5, 0.5]],
    }
    tensors = {name: torch.tensor(values, dtype=torch.float64)[None, :, None] for name, values in rows.items()}
    decay, beta = (torch.tensor(x, dtype=torch.float64)[None, :, None] for x in ([0.9, 0.5, 0.8], [0.5, 1, 0.25]))
    inputs = DeltaInputs(**tensors, log_decay=decay.log(), beta=beta)
    out, final = backend.apply(inputs, DeltaOptions(chunk_size=2))
    expected = torch.tensor([[0.5, 1], [2.28, -1.04], [2.1352, -0.5336]], dtype=torch.float64)
    torch.testing.assert_close(out[0, :, 0], expected)
    torch.testing.assert_close(final[0, 0], torch.tensor([[1.568, -0.224], [1.493, -0.499]], dtype=torch.float64))


@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
def test_chunks_equal_the_recurrence_with_all_gradients(length: int, with_documents: bool) -> None:
    """A wrong term between chunks, or a gradient of one input, would train another model than the published one."""
    inputs, state = drawn(length, with_documents=with_documents)
    for chunk_size in (1, 4, 64):
        options = DeltaOptions(scale=0.7, normalizes=True, chunk_size=chunk_size)
        expected = with_gradients(recurrent.apply, inputs, options, state)
        assert_same(with_gradients(chunked.apply, inputs, options, state), expected)


@pytest.mark.parametrize("backend", EVERYWHERE.values(), ids=EVERYWHERE)
def test_a_sequence_can_be_split_anywhere(backend: Backend) -> None:
    """Generation and context parallelism go on with a state; one that is wrong changes every later token."""
    (inputs, state), options = drawn(11), DeltaOptions(chunk_size=4)
    whole, final = backend.apply(inputs, options, state)
    for place in (1, 4, 6, 10):
        first, between = backend.apply(sliced(inputs, 0, place), options, state)
        second, last = backend.apply(sliced(inputs, place, None), options, between)
        torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(last, final, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", EVERYWHERE.values(), ids=EVERYWHERE)
def test_packed_documents_equal_separate_ones(backend: Backend) -> None:
    """A document's state must not reach the next one, whether it ends at a chunk's border or within it, and also where
    an id comes back.
    """
    inputs, state = drawn(12)
    documents = torch.tensor([[5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 5, 5]]).expand(2, -1)
    options = DeltaOptions(chunk_size=4)
    packed, final = backend.apply(dataclasses.replace(inputs, document_ids=documents), options, state)
    parts = [sliced(inputs, *ends) for ends in ((0, 4), (4, 10), (10, 12))]
    states = (state, None, None)
    alone = [backend.apply(part, options, before) for part, before in zip(parts, states)]
    torch.testing.assert_close(packed, torch.cat([out for out, _ in alone], 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(final, alone[-1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("log_decay", [0.0, -60.0], ids=["nothing is forgotten", "everything is forgotten"])
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_keys(dtype: torch.dtype, beta: float, log_decay: float) -> None:
    """The systems of equations are hardest to solve for them, and a sum of strong decays overflows above the diagonal
    unless it is masked first.
    """
    inputs, state = drawn(64)
    same = inputs.k[:, :1].expand(-1, 64, -1, -1)
    wide = dataclasses.replace(
        inputs, k=same, log_decay=torch.full_like(inputs.beta, log_decay), beta=torch.full_like(inputs.beta, beta)
    )
    narrow = dataclasses.replace(wide, **{name: getattr(wide, name).to(dtype) for name in NAMES})
    options = DeltaOptions(normalizes=True)
    expected = with_gradients(recurrent.apply, wide, options, state)
    found = with_gradients(chunked.apply, narrow, options, state.to(dtype))
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2  # gradients are as large as 200
    assert_same({name: x.double() for name, x in found.items()}, expected, atol=tolerance)


def test_numbers_in_bf16_keep_their_states_in_fp32() -> None:
    """Sums of log decays in bf16 lose all digits after a few hundred tokens."""
    inputs, state = drawn(40)
    narrow = dataclasses.replace(inputs, **{name: getattr(inputs, name).bfloat16() for name in NAMES})
    rounded = dataclasses.replace(inputs, **{name: getattr(narrow, name).double() for name in NAMES})
    options = DeltaOptions(normalizes=True, chunk_size=16)
    out, final = chunked.apply(narrow, options, state)
    expected, last = recurrent.apply(rounded, options, state)
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(final.double(), last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
def test_a_slice_is_an_affine_map_of_the_state_before_it(with_documents: bool) -> None:
    """With context parallelism a rank learns the state before its slice last; then its results, its final state and all
    gradients must be those of having known it.
    """
    inputs, state = drawn(9, with_documents=with_documents)
    options = DeltaOptions(scale=0.6, normalizes=True, chunk_size=4)

    def by_map(given: DeltaInputs, options: DeltaOptions, before: Tensor) -> tuple[Tensor, Tensor]:
        found = slice_map(given, options, chunked)
        return found.outputs_after(before), torch.matmul(found.transition, before) + found.added

    assert_same(with_gradients(by_map, inputs, options, state), with_gradients(recurrent.apply, inputs, options, state))


def stand_in_for_fla() -> ModuleType:
    """A module with the signature of flash-linear-attention 0.6.0, which computes by the recurrence; texts lie side by
    side where their ends are given.
    """
    module = ModuleType("fla.ops.gated_delta_rule")

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        assert not (use_beta_sigmoid_in_kernel or allow_neg_eigval or state_v_first or kwargs), "not asked for"
        assert output_final_state and initial_state is not None and q.shape[2] == v.shape[2]
        options = DeltaOptions(k.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm_in_kernel)
        inputs = DeltaInputs(q, k, v, g, beta)
        if cu_seqlens is None:
            return recurrent.apply(inputs, options, initial_state)
        assert q.shape[0] == 1 and len(initial_state) == len(cu_seqlens) - 1
        ends = cu_seqlens.tolist()
        texts = [
            recurrent.apply(sliced(inputs, start, stop), options, before[None])
            for start, stop, before in zip(ends, ends[1:], initial_state)
        ]
        return torch.cat([out for out, _ in texts], 1), torch.cat([state for _, state in texts])

    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("with_documents", [False, True], ids=["one document", "documents"])
def test_kernels_are_called_for_what_the_recurrence_computes(
    monkeypatch: pytest.MonkeyPatch, with_documents: bool
) -> None:
    """Flash-linear-attention takes documents as texts of a batch of one, each with a state of its own."""
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", stand_in_for_fla())
    imported.cache_clear()
    assert fla.missing() is None
    inputs, state = drawn(7, with_documents=with_documents)
    options = DeltaOptions(scale=0.6, normalizes=True)
    found = with_gradients(fla.apply, inputs, options, state)
    assert_same(found, with_gradients(recurrent.apply, inputs, options, state))
    imported.cache_clear()


def test_the_backend_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto takes kernels where they serve the layer and are installed; one that is named and can't serve it is an
    error.
    """
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    imported.cache_clear()
    gpu, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert choose("auto", device=cpu, dtype=bf16, key_width=128).backend is chunked
    assert choose("recurrent", device=cpu, dtype=bf16, key_width=128).backend is recurrent
    with expect_error(ConfigError, "--linear-attention-backend fla"):
        choose("fla", device=cpu, dtype=bf16, key_width=128)
    with expect_error(ConfigError, "--linear-attention-backend fla", "flash-linear-attention"):
        choose("fla", device=gpu, dtype=bf16, key_width=128)
    monkeypatch.setattr(fla, "missing", lambda: None)
    assert choose("auto", device=gpu, dtype=bf16, key_width=128).backend is fla
    assert choose("auto", device=gpu, dtype=torch.float64, key_width=128).backend is chunked
    with expect_error(ConfigError, "--linear-attention-backend fla", 512, 256):
        choose("fla", device=gpu, dtype=bf16, key_width=512)
