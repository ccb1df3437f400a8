"""The operators that a real GPU runs are those that its trace runs.

python -m pytest tests/gpu                             all operators and modules, 3 samples of each
TORCHMEM_SHARD=2/8 python -m pytest tests/gpu          an eighth of them
TORCHMEM_SAMPLES=0 python -m pytest tests/gpu -k conv  all samples of some

``python -m benchmarks.operator_lists`` gives the same as one report.
"""

import os
from typing import Any

import pytest
import torch

from benchmarks.comparison import Status
from benchmarks.conformance.samples import samples, shard, units
from benchmarks.operator_lists import gpu_here, run_sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for torch's samples, which takes seconds, only where they can run."""
    found: list[Any] = []
    if torch.cuda.is_available():
        part, parts = (int(number) for number in os.environ.get("TORCHMEM_SHARD", "1/1").split("/"))
        found = shard(units(layouts=("contiguous",)), part - 1, parts)
    metafunc.parametrize("unit", found, ids=lambda unit: unit.case)


def test_the_same_operators(unit: Any) -> None:
    gpu = gpu_here()
    wrong = []
    ran = 0
    for sample in samples(unit, int(os.environ.get("TORCHMEM_SAMPLES", "3"))):
        found = run_sample(f"{unit.case}/{sample.index}", sample, lambda: None, "cuda", gpu)
        ran += found.status is not Status.SKIPPED
        if found.status not in (Status.EXACT, Status.SKIPPED):
            wrong.append(
                f"{found.case} {sample.detail[:200]}\n  {found.status.value}: {found.error}"
            )
    assert not wrong, "\n".join(["real only (-), traced only (+)", *wrong])
    if not ran:
        pytest.skip("no sample of it runs on this GPU")
