"""The parts of the suite that a fault in a file can turn red, by a rule from the file's package."""

from __future__ import annotations

from pathlib import Path

from tests.faults.fault import REPOSITORY, Fault

AFFECTED = {
    "megatron/core/parallel": "unit/parallel parallel equivalence",
    "megatron/core/tensor_parallel": "unit/tensor_parallel parallel equivalence",
    "megatron/core/context_parallel": "unit/context_parallel parallel equivalence",
    "megatron/core/pipeline_parallel": "unit/pipeline_parallel parallel equivalence",
    "megatron/core/distributed": "unit/distributed parallel equivalence",
    "megatron/core/optimizer": "unit/optimizer parallel equivalence unit/training",
    "megatron/core/diloco": "unit/diloco parallel",
    "megatron/core/moe": "unit/moe unit/models parallel equivalence unit/conversion",
    "megatron/core/ssm": "unit/ssm unit/models equivalence parallel unit/conversion",
    "megatron/core/vision": "unit/models unit/conversion equivalence",
    "megatron/core/images": "unit/images unit/tools unit/inference end_to_end",
    "megatron/core/ops": "unit/ops unit/models equivalence parallel",
    "megatron/core/transformer": "unit/transformer unit/models equivalence parallel unit/conversion",
    "megatron/core/models": "unit/models unit/conversion unit/training equivalence unit/tools unit/tasks end_to_end",
    "megatron/core/objectives": "unit/objectives equivalence",
    "megatron/core/datasets": "unit/datasets unit/training unit/tools parallel end_to_end",
    "megatron/core/tokenizers": "unit/tokenizers unit/tools unit/serving unit/conversion end_to_end",
    "megatron/core/checkpointing": "unit/checkpointing parallel unit/training unit/tools end_to_end",
    "megatron/core/conversion": "unit/conversion unit/tools unit/training end_to_end",
    "megatron/core/quantization": "unit/quantization unit/conversion unit/inference",
    "megatron/core/inference": "unit/inference unit/serving unit/tools parallel end_to_end",
    "megatron/core/files": "unit/files unit/checkpointing end_to_end",
    "megatron/core/device.py": "unit/test_device.py unit/parallel end_to_end",
    "megatron/config": "unit/config unit/optimizer unit/planning unit/training end_to_end",
    "megatron/serving": "unit/serving unit/tools end_to_end",
    "megatron/planning": "unit/planning end_to_end",
    "megatron/rehearsal": "unit/rehearsal end_to_end",
    "megatron/library": "unit/library unit/test_library_page.py end_to_end",
    "megatron/preprocessing": "unit/preprocessing unit/tools unit/files end_to_end",
    "megatron/training": "unit/training parallel equivalence end_to_end",
    "megatron/small_files.py": "unit/test_small_files.py unit/test_readers.py unit/serving unit/conversion",
    "megatron/errors.py": "unit/test_errors.py unit/tools end_to_end",
    "tasks": "unit/tasks end_to_end",
    "tools": "unit/tools unit/conversion unit/serving unit/planning end_to_end",
}
"""Folders and files of ``tests`` by the package of a fault, those that are more likely to fail first."""


def affected(fault: Fault) -> list[str]:
    """Folders and files of tests that a fault in this file affects, likely ones first.

    Raises ValueError for a file of a package that has no row.
    """
    packages = [package for package in AFFECTED if Path(fault.file).is_relative_to(package)]
    if not packages:
        raise ValueError(f"fault {fault.name}: no row of AFFECTED in tests/faults/affected.py covers {fault.file}")
    return [f"tests/{part}" for part in AFFECTED[max(packages, key=len)].split()]


def likely(fault: Fault) -> list[str]:
    """Files of tests to try first: those that the fault names, otherwise those that are named like its file."""
    if fault.first:
        return [f"tests/{name.partition('::')[0]}" for name in fault.first]
    stem = Path(fault.file).stem
    tests = REPOSITORY / "tests"
    return sorted(f"tests/{path.relative_to(tests)}" for path in tests.rglob(f"test_{stem}.py"))
