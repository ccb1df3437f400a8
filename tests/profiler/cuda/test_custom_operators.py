"""Operators that torch does not come with, and kernels that cannot be traced."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UnsupportedOperatorError, UsageError
from pytest_torchmem.profiler.devices.catalogue import Gpu, find_gpu, registered_gpus


@torch.library.custom_op("torchmem_tests::scaled", mutates_args=(), device_types="cuda")
def scaled(x: Tensor, factor: float) -> Tensor:
    """Never run: there is no kernel for the CPU."""
    raise AssertionError


@scaled.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, grad: (scaled(grad, 2.0), None))


@torch.library.custom_op("torchmem_tests::filled", mutates_args=("x",))
def filled(x: Tensor, value: float) -> None:
    """Write to an argument."""
    x.fill_(value)


torch.library.define("torchmem_tests::untold", "(Tensor x) -> Tensor")
torch.library.impl("torchmem_tests::untold", "CPU", lambda x: x.clone())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_custom_operators_need_no_further_step(device: str) -> None:
    weight = nn.Parameter(torch.ones(256, 256))

    def program() -> None:
        x = torch.ones(256, 256, device=device, requires_grad=True)
        output = scaled(x, 2.0)
        filled(output.detach(), 1.0)
        output.sum().backward()
        assert x.grad is not None

    profile = trace(program, device=device)
    size = 4 * 256 * 256
    names = [one.origin.operator for one in profile.timeline.allocations if one.nbytes == size]
    assert names.count("torchmem_tests::scaled") == 2
    assert weight.grad is None


def test_an_operator_without_geometry_is_named() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"torchmem_tests::untold.*register_fake"):
        trace(lambda: torch.ops.torchmem_tests.untold(torch.ones(3)), device="cuda")


def test_a_triton_kernel_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class JITFunction:
        __name__ = "add_kernel"

        def run(self, *args: Any, **kwargs: Any) -> str:
            return "launched"

    for name in ("triton", "triton.runtime", "triton.runtime.jit"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["triton.runtime.jit"].JITFunction = JITFunction  # type: ignore[attr-defined]
    kernel = JITFunction()
    with pytest.raises(UnsupportedOperatorError, match=r"'add_kernel'.*custom_op.*register_fake"):
        trace(lambda: kernel.run(torch.ones(3, device="cuda"), grid=(1,)), device="cuda")
    assert kernel.run() == "launched"


def test_gpus_can_be_added() -> None:
    mine = Gpu("mine-1", "My GPU", (8, 9), 20 * 1024**3, 100, 1536)
    names = []
    with registered_gpus(mine):
        assert find_gpu("MINE 1") is mine
        trace(lambda: names.append(torch.cuda.get_device_name()), device="cuda", gpu="mine-1")
        with pytest.raises(UsageError, match="taken"), registered_gpus(mine):
            pass
    assert names == ["My GPU"]
    with pytest.raises(UsageError, match="not a known GPU"):
        find_gpu("mine-1")
    for wrong in (
        Gpu("h100", "", (9, 0), 1, 1, 1),
        Gpu("x", "", (3, 0), 1, 1, 1),
        Gpu("x", "", (9, 0), 0, 1, 1),
    ):
        with pytest.raises(UsageError, match="cannot be added"), registered_gpus(wrong):
            pass
