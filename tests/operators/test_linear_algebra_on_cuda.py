"""Linear algebra whose small requests are in another order than torch's CUDA code has, by its peaks
(2.13.0+cu130, as an A100, without a GPU).

What cuSOLVER asks for itself is not known, here or there, and counts as nothing.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, linalg, nn

from pytest_torchmem import trace

Program = Callable[[Tensor, Tensor], Tensor]
PROGRAMS: dict[str, tuple[Program, tuple[int, ...], tuple[int, ...], int, int]] = {
    "solve large": (linalg.solve, (4, 300, 300), (4, 300, 8), 11_541_296, 22_919_368),
    "determinant": (lambda a, b: linalg.slogdet(a)[1], (16, 64, 64), (1,), 9_057_860, 18_371_468),
    "least squares": (lambda a, b: linalg.lstsq(a, b)[0], (64, 32), (64, 8), 8_540_308, 17_186_824),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks(name: str) -> None:
    program, first, second, forward, backward = PROGRAMS[name]
    model = nn.Module()
    model.forward = program
    a, b = (torch.randn(shape, requires_grad=True) for shape in (first, second))
    profile = trace(model, a, b, device="cuda", gpu="a100-80gb")
    assert (profile.forward_peak, profile.backward_peak) == (forward, backward)


def test_what_cusolver_takes_is_not_known() -> None:
    def body() -> None:
        linalg.lstsq(torch.ones(64, 32, device="cuda"), torch.ones(64, 8, device="cuda"))

    assert trace(body, device="cuda").unknown_workspaces == ("aten::linalg_lstsq",)
