"""Fourier transforms in half precision, which the GPU has and the CPU refuses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace
from tests.results import in_a_trace, on_fake_cuda

HALF, FLOAT = torch.float16, torch.float32
OF_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
HALVES = {torch.complex64: torch.complex32, FLOAT: HALF}


def results(function: Callable[[Tensor], Tensor], dtype: torch.dtype, *shape: int) -> list[Any]:
    """Return what a transform and its gradient are like, and what they allocate."""
    found: list[Any] = []

    def step() -> None:
        input = torch.ones(*shape, dtype=dtype, device="cuda", requires_grad=True)
        output = function(input)
        output.abs().sum().backward()
        gradient = input.grad
        assert gradient is not None
        for one in (output, gradient):
            found.extend([one.dtype, one.shape, one.stride(), one.is_conj()])

    every = trace(step, device="cuda").timeline.allocations
    made = [one.nbytes for one in every if one.kind.name != "WORKSPACE"]
    return [*found, made]


@pytest.mark.parametrize("name", [name + kind for name in OF_ONE for kind in ("", "2", "n")])
def test_a_transform_in_half_takes_half_of_one_in_single_precision(name: str) -> None:
    transform = getattr(torch.fft, name)
    several = name[-1] in "2n"
    shape = (8, 8, 9) if name.startswith(("irf", "hf")) else (8, 8, 8)
    for options in ({}, {"s": (4, 16)} if several else {"n": 16}):
        half, single = (
            results(lambda x, options=options: transform(x, **options), dtype, *shape)
            for dtype in (HALF, FLOAT)
        )
        assert half.pop() == [nbytes // 2 for nbytes in single.pop()]
        assert half == [HALVES.get(one, one) for one in single]


@pytest.mark.parametrize("name", OF_ONE)
def test_values_are_those_of_single_precision(name: str) -> None:
    def of(dtype: torch.dtype) -> list[complex]:
        input = torch.tensor([1, 2, 3, 4, 5.0], device="cuda", dtype=dtype)
        given = input if name in ("irfft", "hfft") else input[:4]
        return getattr(torch.fft, name)(given).tolist()

    half, single = (on_fake_cuda(partial(of, dtype), values="real") for dtype in (HALF, FLOAT))
    torch.testing.assert_close(half, single, atol=0.05, rtol=0)


@in_a_trace("cuda")
def test_a_result_that_is_given_is_written_to() -> None:
    input = torch.ones(4, 8, dtype=HALF, device="cuda")
    for name, size in (("rfft", 5), ("ihfft", 5), ("fft2", 8), ("rfft2", 5), ("ihfft2", 5)):
        out = torch.empty(4, size, dtype=torch.complex32, device="cuda")
        assert getattr(torch.fft, name)(input, out=out) is out


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=HALF, device="cuda")


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (lambda: torch.fft.rfft(ones(3, 60)), r"powers of two .* signal size of\[60\]"),
        (lambda: torch.fft.irfft(ones(9), n=60), r"signal size of\[60\]"),
        (lambda: torch.fft.fftn(ones(4, 60)), r"signal size of\[4, 60\]"),
        (lambda: torch.fft.rfft(ones(8), dim=1), r"expected to be in range of \[-1, 0\]"),
        (lambda: torch.fft.rfft(ones(8), n=0), r"Invalid number of data points \(0\)"),
        (lambda: torch.fft.rfft(ones(8), norm="one"), 'normalization mode: "one"'),
        (lambda: torch.fft.rfftn(ones(4, 8), dim=(1, 1)), "dims must be unique"),
        (lambda: torch.fft.rfftn(ones(8), s=(1, 1)), "2 values but input tensor only has 1"),
        (lambda: torch.fft.rfft(ones(8), out=ones(5)), "rfft expects a complex output tensor"),
        (lambda: torch.fft.fft(ones(8).cpu()), "Unsupported dtype Half"),
    ],
)
def test_what_is_refused(transform: Callable[[], Tensor], sentence: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=sentence):
        trace(transform, device="cuda")


@pytest.mark.parametrize(
    ("transform", "nbytes"),
    [
        (lambda: torch.fft.irfft(torch.ones(4, 5, device="cuda", dtype=torch.complex64)), 160),
        (lambda: torch.fft.rfft(torch.ones(4, 8, device="cuda")), 0),
        (lambda: torch.fft.rfft(torch.ones(4, 8, device="cuda"), dim=0), 0),
        (lambda: torch.fft.rfft(ones(4, 8), dim=0), 64),
        (lambda: torch.fft.rfft(torch.ones(4, 8, 2, device="cuda"), dim=1), 256),
        (lambda: torch.fft.rfft(torch.ones(4, 1, device="cuda").expand(4, 8)), 128),
        (lambda: torch.fft.rfftn(torch.ones(4, 8, device="cuda")), 160),
    ],
)
def test_what_pytorch_copies_for_cufft(transform: Callable[[], Tensor], nbytes: int) -> None:
    """native/cuda/SpectralOps.cpp; what cuFFT takes itself stays unknown."""
    profile = trace(transform, device="cuda")
    made = profile.timeline.allocations
    assert sum(one.nbytes for one in made if one.kind.name == "WORKSPACE") == nbytes
    assert profile.unknown_workspaces


@pytest.mark.parametrize("name", ["abs", "trace"])
def test_truth_values_that_only_the_gpu_takes(name: str) -> None:
    def step(device: str) -> str:
        return str(getattr(torch.ones(3, 3, dtype=torch.bool, device=device), name)().dtype)

    trace(step, "cuda", device="cuda")
    with pytest.raises(NotImplementedError, match="'Bool'"):
        trace(step, "cpu")
