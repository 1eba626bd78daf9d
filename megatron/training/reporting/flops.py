"""Throughput: tokens/s, TFLOP/s and MFU, and the peak of a device that MFU is a share of."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch
from typing_extensions import override

from megatron.core.ops.matmul import times_transposed
from megatron.training.reporting.metrics import readable


@dataclass(frozen=True)
class Peak:
    """The highest arithmetic throughput of a device, and the source of that figure."""

    tflops: float
    source: str

    @override
    def __str__(self) -> str:
        return f"{self.tflops:.4g} TFLOP/s ({self.source})"


# Dense matrix-product peaks in TFLOP/s from the makers' data sheets: (part of the device name, 16-bit, 32-bit).
# The first row whose name occurs as a whole word is used, so "H100 PCIe" comes before "H100".
_DATA_SHEETS = (
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("B100", 1750.0, 60.0),
    ("H200", 989.4, 66.9),
    ("GH200", 989.4, 66.9),
    ("H100 PCIe", 756.0, 51.2),
    ("H100 NVL", 835.0, 60.0),
    ("H100", 989.4, 66.9),
    ("A100", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("A10", 125.0, 31.2),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("MI325X", 1307.4, 163.4),
    ("MI300X", 1307.4, 163.4),
)


def data_sheet_peak(device_name: str, dtype: torch.dtype) -> Peak | None:
    """Peak of an accelerator for products of ``dtype``; None for one that is not in the table."""
    for name, half, single in _DATA_SHEETS:
        if re.search(rf"\b{name}\b", device_name):
            narrow = dtype in (torch.bfloat16, torch.float16)
            return Peak(half if narrow else single, f"{device_name}, {'16' if narrow else '32'}-bit dense, data sheet")
    return None


def measured_peak(device: torch.device, dtype: torch.dtype, *, size: int = 512, repeats: int = 40) -> Peak:
    """Throughput of the fastest of many short square matrix products, timed here, for CPUs.

    They are short, so that some run undisturbed on a shared machine; a tenth of a second in all.
    """
    factor = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        times_transposed(factor, factor)
        seconds.append(time.perf_counter() - start)
    threads = torch.get_num_threads()
    kind = f"{size}x{size} {str(dtype).removeprefix('torch.')} product"
    source = f"measured here: {kind}, {threads} thread{'s' * (threads > 1)}"
    return Peak(2 * size**3 / min(seconds) / 1e12, source)


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """The peak for MFU: from the data sheet or, on a CPU, measured; None for an accelerator that isn't known."""
    if device.type == "cpu":
        return measured_peak(device, dtype)
    return data_sheet_peak(torch.get_device_module(device).get_device_name(device), dtype)


@dataclass(frozen=True)
class Throughput:
    """Speed over an interval. ``tflops_per_device``: model FLOPs; ``utilization``: their share of the peak (MFU)."""

    tokens_per_second: float
    tflops_per_device: float
    utilization: float | None


@dataclass(frozen=True, kw_only=True)
class SpeedScale:
    """Converts samples and seconds into tokens/s, TFLOP/s and MFU."""

    flops_per_sample: float
    tokens_per_sample: int
    world_size: int
    peak: Peak | None = None

    def throughput(self, *, samples: float, seconds: float) -> Throughput:
        """Speed of ``samples`` processed by the whole world in ``seconds``."""
        tflops = self.flops_per_sample * samples / (seconds * 1e12 * self.world_size)
        share = None if self.peak is None else tflops / self.peak.tflops
        return Throughput(self.tokens_per_sample * samples / seconds, tflops, share)


def throughput_line(speed: Throughput, scale: SpeedScale) -> str:
    """The line after the log line with ``--log-throughput``: tokens/s, TFLOP/s, and MFU with its peak."""
    line = f" throughput | tokens/s: {speed.tokens_per_second:.1f} |"
    line += f" model TFLOP/s per device: {speed.tflops_per_device:.4g} |"
    if speed.utilization is None or scale.peak is None:
        return f"{line} MFU: unknown, no peak on file for this device |"
    return f"{line} MFU: {readable(100 * speed.utilization)}% of {scale.peak} |"
