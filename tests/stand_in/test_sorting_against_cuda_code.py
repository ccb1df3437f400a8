"""Requests of sorting, counting, picking and scattering against those of torch's own CUDA code.

    torchmem stand-in --gpu h100 -- pytest tests/stand_in

CUB's temporary storage differs between generations of GPUs, so that this is for any of them.
"""

import os

import pytest

import pytest_torchmem as torchmem
from pytest_torchmem.checks.gpu import find_parting
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.operators.cuda_programs import PROGRAMS

pytestmark = pytest.mark.skipif(
    "STAND_IN_NAME" not in os.environ,
    reason="runs by: torchmem stand-in --gpu h100 -- pytest tests/stand_in",
)

SINCE = {"counts": (2, 13), "histogram": (2, 12), "samples": (2, 12)}
"""Before these versions, single numbers are requested in another order."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_requests_are_those_of_the_gpu_that_is_described(name: str) -> None:
    if SINCE.get(name, TORCH_VERSION) > TORCH_VERSION:
        pytest.skip("single numbers come in another order")
    gpu = next(one for one in gpu_names() if find_gpu(one).product == os.environ["STAND_IN_NAME"])
    measured = torchmem.measure(PROGRAMS[name], device="cuda")
    traced = torchmem.trace(PROGRAMS[name], device="cuda", gpu=gpu, memory="unlimited")
    assert find_parting(traced, measured) is None
