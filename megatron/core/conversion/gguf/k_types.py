"""Weights as llama.cpp's K types: blocks of 256 numbers, in parts whose scales have few bits themselves.

====  ===================  ======================================  ==============================
type  parts of a block     a number                                bytes of a block
====  ===================  ======================================  ==============================
Q4_K  8 of 32 numbers      ``d·scale·q - dmin·minimum``, q 4 bits  2 + 2 + 12 + 128
Q5_K  8 of 32 numbers      the same, q 5 bits                      2 + 2 + 12 + 32 + 128
Q6_K  16 of 16 numbers     ``d·scale·(q - 32)``, q 6 bits          128 + 64 + 16 + 2
====  ===================  ======================================  ==============================

d and dmin are fp16, scales and minima of Q4_K and Q5_K whole numbers of 6 bits, those of Q6_K of 8 with a sign. Scales
are those of the smallest squared error among some; each number is then rounded to the nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.core.conversion.gguf.number_types import BLOCK_OF_K, library

_Array = np.ndarray[Any, Any]
_ROWS_AT_ONCE = 1 << 12  # blocks, so that copies of a large weight stay small
_STRETCHES = np.linspace(0.8, 1.15, 15, dtype=np.float32)
"""Scales that are tried, as parts of the one with which a part's extremes just fit."""


def packed(numbers: _Array, kind: Any) -> _Array:
    """Numbers ``[…, n]`` in fp32 as the bytes of ``kind``, a type of the gguf package."""
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        bytes_of: _Array = library().quants.quantize(numbers, kind)
        return bytes_of
    blocks = numbers.reshape(-1, BLOCK_OF_K)
    runs = [blocks[at : at + _ROWS_AT_ONCE] for at in range(0, len(blocks), _ROWS_AT_ONCE)]
    pack = _pack_signed if kind.name == "Q6_K" else _pack_with_minima
    rows = np.concatenate([pack(run, 5 if kind.name == "Q5_K" else 4) for run in runs])
    return rows.reshape(*numbers.shape[:-1], -1)


def _pack_with_minima(blocks: _Array, bits: int) -> _Array:
    """Q4_K or Q5_K of blocks ``[n, 256]``, ``[n, bytes]``."""
    count, most = len(blocks), (1 << bits) - 1
    parts = blocks.reshape(count, 8, 32)
    scales, minima = _scales_and_minima(parts, most)
    d, scale_codes = _in_six_bits(scales)
    dmin, minimum_codes = _in_six_bits(minima)
    steps = (d.astype(np.float32) * scale_codes)[..., None]
    offsets = (dmin.astype(np.float32) * minimum_codes)[..., None]
    codes = np.rint((parts + offsets) / np.where(steps == 0, 1, steps)).clip(0, most).astype(np.uint8)
    nibbles = (codes & 15).reshape(count, 4, 2, 32)
    low = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(count, 128)
    places = np.arange(8, dtype=np.uint8)[:, None]
    high = [np.bitwise_or.reduce((codes >> 4) << places, axis=1)] if bits == 5 else []
    ends = [d.view(np.uint8), dmin.view(np.uint8)]
    return np.concatenate([*ends, _twelve_bytes(scale_codes, minimum_codes), *high, low], axis=-1)


def _scales_and_minima(parts: _Array, most: int) -> tuple[_Array, _Array]:
    """Scales and minima ``[n, 8]``, neither negative, with which codes of 0 to ``most`` are nearest to ``parts``."""
    low, high = np.minimum(parts.min(-1), 0), parts.max(-1)
    fitting = np.maximum(high - low, 0) / most
    best_scale, best_minimum = fitting, -low
    least = np.full(fitting.shape, np.inf, np.float32)
    mean = parts.mean(-1)
    for stretch in _STRETCHES:
        step = np.where(fitting == 0, 1, fitting * stretch)
        codes = np.rint((parts - low[..., None]) / step[..., None]).clip(0, most)
        # The line through the numbers over their codes; through the origin where its minimum would be below.
        code_mean = codes.mean(-1)
        spread = (codes * codes).mean(-1) - code_mean**2
        together = (codes * parts).mean(-1)
        scale = np.where(spread > 0, (together - code_mean * mean) / np.where(spread > 0, spread, 1), 0)
        minimum = code_mean * scale - mean
        squares = (codes * codes).sum(-1)
        plain = np.where(squares > 0, (codes * parts).sum(-1) / np.where(squares > 0, squares, 1), 0)
        scale, minimum = np.where(minimum < 0, plain, scale), np.maximum(minimum, 0)
        error = np.square(scale[..., None] * codes - minimum[..., None] - parts).sum(-1)
        better = (error < least) & (scale >= 0)
        least = np.where(better, error, least)
        best_scale, best_minimum = np.where(better, scale, best_scale), np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _in_six_bits(values: _Array) -> tuple[_Array, _Array]:
    """fp16 steps ``[n, 1]`` and codes ``[n, 8]`` of values that aren't negative."""
    step = (values.max(-1, keepdims=True) / 63).astype(np.float16)
    wide = step.astype(np.float32)
    codes = np.rint(values / np.where(wide == 0, 1, wide)).clip(0, 63) * (wide > 0)
    return step, codes.astype(np.uint8)


def _twelve_bytes(scales: _Array, minima: _Array) -> _Array:
    """Eight scales and eight minima of six bits: four of each in a byte, with two bits of one of the other four."""
    first = (scales[:, :4] & 63) | (scales[:, 4:] >> 4) << 6
    second = (minima[:, :4] & 63) | (minima[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def _pack_signed(blocks: _Array, bits: int) -> _Array:
    """Q6_K of blocks ``[n, 256]``, ``[n, 210]``."""
    count = len(blocks)
    parts = blocks.reshape(count, 16, 16)
    scales = _signed_scales(parts)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(-1)[:, None], -1)
    d = (largest / -128).astype(np.float16)
    wide = d.astype(np.float32)
    scale_codes = np.rint(scales / np.where(wide == 0, 1, wide)).clip(-128, 127) * (wide != 0)
    steps = (wide * scale_codes)[..., None]
    codes = (np.rint(parts / np.where(steps == 0, 1, steps)).clip(-32, 31) + 32).astype(np.uint8)
    halves = codes.reshape(count, 2, 128)
    low = halves[..., :64] & 15 | (halves[..., 64:] & 15) << 4
    quarters = (halves >> 4).reshape(count, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(quarters, axis=2)
    ends = [scale_codes.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    return np.concatenate([low.reshape(count, 128), high.reshape(count, 64), *ends], axis=-1)


def _signed_scales(parts: _Array) -> _Array:
    """Scales ``[n, 16]`` with which codes of -32 to 31 are nearest to ``parts``; the largest number gets -32."""
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)[..., 0]
    best, least = largest / -32, np.full(largest.shape, np.inf, np.float32)
    for stretch in _STRETCHES:
        step = largest / -32 * stretch
        codes = np.rint(parts / np.where(step == 0, 1, step)[..., None]).clip(-32, 31)
        squares = (codes * codes).sum(-1)
        scale = (codes * parts).sum(-1) / np.where(squares == 0, 1, squares)
        error = np.square(scale[..., None] * codes - parts).sum(-1)
        best, least = np.where(error < least, scale, best), np.minimum(least, error)
    return best
