"""Whose kernels take a convolution on a GPU."""

from typing import Any

import pytest
import torch

from pytest_torchmem.cudnn.questions import Version
from pytest_torchmem.operators.calls import ConvolutionSettings
from pytest_torchmem.operators.convolution.choice import CudaBackend, cuda_backend
from pytest_torchmem.targets.gpus import find_gpu

CUDNN, DEPTHWISE, SLOW = CudaBackend.CUDNN, CudaBackend.DEPTHWISE, CudaBackend.SLOW
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
IMAGE, VOLUME = ((2, 64, 14, 14), (64, 64, 3, 3)), ((2, 8, 8, 8, 8), (16, 8, 3, 3, 3))
DEEP = ((2, 64, 14, 14), (64, 1, 3, 3))


def backend(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    *,
    gpu: str = "a100",
    version: Version = (9, 20, 0),
    last: bool = False,
    stride: int = 1,
    **settings: Any,
) -> CudaBackend:
    """Return whose kernels convolve tensors of two shapes."""
    input, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    if last:
        input = input.contiguous(memory_format=torch.channels_last)
    dims = input.dim() - 2
    given = ConvolutionSettings((stride,) * dims, (1,) * dims, (1,) * dims, **settings)
    return cuda_backend(find_gpu(gpu), input, weight, given, version)


@pytest.mark.parametrize(
    ("shapes", "dtype", "options", "expected"),
    [
        (IMAGE, FLOAT, {}, CUDNN),
        (IMAGE, torch.int32, {}, SLOW),
        (IMAGE, BFLOAT, {}, CUDNN),
        (IMAGE, BFLOAT, {"gpu": "t4"}, SLOW),
        (IMAGE, FLOAT, {"transposed": True, "output_padding": (1, 1), "stride": 2}, CUDNN),
        (IMAGE, FLOAT, {"transposed": True, "output_padding": (1, 1)}, SLOW),
        (VOLUME, BFLOAT, {}, CUDNN),
        (VOLUME, BFLOAT, {"version": (9, 10, 2)}, SLOW),
        (VOLUME, FLOAT, {"version": (9, 10, 2)}, CUDNN),
        (DEEP, FLOAT, {"groups": 64}, DEPTHWISE),
        (DEEP, FLOAT, {"groups": 64, "last": True}, CUDNN),
        (DEEP, HALF, {"groups": 64}, CUDNN),
        (DEEP, HALF, {"groups": 64, "stride": 2}, DEPTHWISE),
        (DEEP, BFLOAT, {"groups": 64}, DEPTHWISE),
    ],
)
def test_backends(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    options: dict[str, Any],
    expected: CudaBackend,
) -> None:
    assert backend(shapes, dtype, **options) is expected
