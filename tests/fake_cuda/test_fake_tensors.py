"""A program's own fake tensors and modes of dispatch on fake cuda, and tensors on ``meta``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pytest_torchmem as torchmem
from pytest_torchmem import trace
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.results import in_a_trace


@torch.library.custom_op("torchmem_fake::squared", mutates_args=())
def squared(x: Tensor) -> Tensor:
    """Return what ``opcheck`` compares with its description."""
    return x * x


squared.register_fake(lambda x: torch.empty_like(x))
GPU = torch.device("cuda:0")


@in_a_trace("cuda")
def test_an_operator_is_checked_against_its_description() -> None:
    tests = ("test_schema", "test_faketensor")
    found = torch.library.opcheck(squared, (torch.ones(3, device="cuda"),), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


def test_they_say_the_device_that_they_stand_for() -> None:
    def program() -> None:
        x = torch.randn(2, 3, device="cuda")
        with FakeTensorMode() as mode, torch.device("cuda"):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # which makes a constant
            fake = mode.from_tensor(x)
            output = model(fake)
            output.sum().backward()
            assert "cuda:0" in repr(output)  # after which the program still is in the mode
            assert (output + 1).device == fake.device == model[0].weight.grad.device == GPU
            assert torch.ones(3, device="cpu").device.type == "cpu"
            with pytest.raises(RuntimeError, match=r"found .*devices"):
                torch.ones(2, 4, device="cpu") + output
            assert torch.tensor(3, device="cuda").item() == 3

    before = torch.ones(1)
    assert trace(program, device="cuda").peak < 2048
    assert before.device.type == "cpu"


@in_a_trace("cuda", gpus=2)
def test_they_are_on_the_gpu_that_is_the_current_one() -> None:
    """Torch remembers what such calls give, and did not know that the GPU was another."""
    for index in (0, 1):
        with torch.cuda.device(index), FakeTensorMode():
            assert torch.empty_strided((257,), (1,), device="cuda").device.index == index


@in_a_trace("cuda")
def test_a_graph_of_them_runs_where_they_were() -> None:
    x = torch.randn(2, 3, device="cuda")

    def added(y: Tensor) -> Tensor:
        return y + torch.zeros(3, device="cuda") + torch.ones(3).to("cuda")

    graph = make_fx(added, tracing_mode="fake")(x)
    assert graph(x).device == GPU


@in_a_trace()
def test_nothing_is_copied_out_of_meta(device: str) -> None:
    empty = torch.empty(3, device="meta")
    for target in (device, "cpu"):
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            empty.to(target)
    with pytest.raises(NotImplementedError, match=r"Please use torch.nn.Module.to_empty\(\)"):
        nn.Linear(2, 2, device="meta").to(device)
    assert empty.to(device="meta", dtype=torch.half).dtype is torch.half


_NoModes: Any = vars(torch._C)["_DisableTorchDispatch"]


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
@in_a_trace("cuda")
def test_what_operators_make_is_on_the_gpu(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    with PassesOn():
        function(x).sum().backward()
    assert x.grad.is_cuda


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="modes are asked wherever there are any")
def test_operators_that_a_mode_is_not_asked_for(device: Any) -> None:
    """Functionalization runs an operator in place on ``meta``, past the mode that is on."""

    def changed(x: Tensor) -> Tensor:
        y = x * 2
        y[0].add_(3)
        return y

    def body(device: str = "cpu") -> tuple[str, list[float]]:
        with PassesOn(), _NoModes():
            y = torch.ones(4, device=device) + 1
        graph = make_fx(torch.func.functionalize(changed))(torch.rand(4, device=device))
        return graph.code.replace("cuda:0", "cpu"), graph(y).tolist()

    results = [body()]
    torchmem.trace(lambda: results.append(body(device)), device=device)
    assert results[0] == results[1]


@in_a_trace("cuda")
def test_what_a_program_asks_the_host_for_is_there() -> None:
    x = torch.randn(3, device="cuda")
    with PassesOn():
        assert torch.ops.aten.zeros.default([3], device="cpu").is_cpu
        assert torch.zeros(3).is_cpu
        assert x.cpu().is_cpu
        assert torch.zeros(3, device="cuda").is_cuda
        assert torch.ops.aten._to_copy.default(x, device="cpu").is_cpu


class Devices(TorchDispatchMode):
    """Writes down the devices that operators are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and "device" in kwargs:
            self.seen.append(str(kwargs["device"]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "device"),
    [
        (lambda x: torch.zeros(3, device="cuda"), "cuda:0"),
        (lambda x: torch.randperm(3, device=x.device), "cuda:0"),
        (lambda x: torch.zeros(3), "cpu"),
        (lambda x: torch.ops.aten.zeros.default([3], device="cpu"), "cpu"),
        (lambda x: torch.empty(3, device="meta"), "meta"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: torch.zeros(3).cuda(), "cuda:0"),
        (lambda x: x.unbind()[0].sum().backward(), "cuda:0"),
    ],
)
def test_a_mode_sees_the_device_that_is_meant(function, device):
    mode = Devices()

    def body() -> None:
        x = torch.randn(3, device="cuda", requires_grad=True)
        with mode:
            with mode:
                function(x)
            mode.seen[:] = mode.seen[-1:]

    torchmem.trace(body, device="cuda")
    assert mode.seen == [device]
    assert "__torch_dispatch__" not in vars(mode)


def test_a_mode_that_is_never_left_is_as_before() -> None:
    mode = Devices()
    torchmem.trace(lambda: mode.__enter__() and None, device="cuda")
    assert "__torch_dispatch__" not in vars(mode)


@pytest.mark.parametrize(
    ("function", "device"),
    [
        (lambda x: x + torch.arange(4, device="cuda"), "cuda"),
        (lambda x: x * torch.tensor([1.0, 2, 3, 4], device="cuda"), "cuda"),
        (lambda x: x.cpu() * torch.tensor([1.0, 2, 3, 4]), "cpu"),
        (lambda x: x.cpu().to("cuda"), "cuda"),
    ],
)
@in_a_trace("cuda")
def test_a_graph_of_real_tensors_runs_where_it_was_traced(function, device):
    x = torch.randn(3, 4, device="cuda")
    graph = make_fx(function, tracing_mode="real")(x)
    assert graph(x).device.type == device


@in_a_trace("cuda")
def test_a_linearized_model_runs_on_the_gpu() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU()).cuda()
    x = torch.randn(5, 6, device="cuda")
    _, tangent = torch.func.linearize(net, x)
    assert tangent(torch.ones_like(x)).is_cuda
