"""Modes of ``torch.utils._python_dispatch``: what C++ makes stays beside its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pytest_torchmem as torchmem


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def tangent(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), torch.randn_like(x))
        tangent = forward_ad.unpack_dual(dual @ x.t()).tangent
        assert tangent is not None
        return tangent


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unbind()[0],
        lambda x: x[:, torch.tensor([0, 1], device="cuda")],
        lambda x: x.trace(),
        lambda x: x.cumprod(0),
        lambda x: functional.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
        lambda x: torch.diag_embed(x),
        lambda x: functional.one_hot(torch.zeros(2, dtype=torch.long, device="cuda"), 4) * x.sum(),
        tangent,
    ],
    ids=["unbind", "index", "trace", "cumprod", "attention", "diagonal", "one_hot", "tangent"],
)
def test_what_operators_make_is_on_the_gpu(function: Callable[[Tensor], Tensor]) -> None:
    def body() -> None:
        x = torch.randn(3, 4, device="cuda", requires_grad=True)
        with PassesOn():
            function(x).sum().backward()
        assert x.grad is not None
        assert x.grad.is_cuda

    torchmem.trace(body, device="cuda")


def test_what_a_program_asks_the_host_for_is_there() -> None:
    def body() -> None:
        x = torch.randn(3, device="cuda")
        with PassesOn():
            assert torch.ops.aten.zeros.default([3], device="cpu").is_cpu
            assert torch.zeros(3).is_cpu
            assert x.cpu().is_cpu
            assert torch.zeros(3, device="cuda").is_cuda
            assert torch.ops.aten._to_copy.default(x, device="cpu").is_cpu

    torchmem.trace(body, device="cuda")
