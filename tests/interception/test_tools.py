"""Tools that take a program apart: export, fake tensors, TorchScript, swapped and lazy tensors."""

import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pytest_torchmem as torchmem
from tests.results import in_a_trace, result_of


def exported(device: str = "cpu") -> Any:
    x = torch.randn(4, 8, device=device)
    return torch.export.export(nn.Linear(8, 8).to(device), (x,)).module()(x)


def exported_for_any_batch(device: str = "cpu") -> Any:
    model, x = nn.Linear(8, 8).to(device), torch.randn(4, 8, device=device)
    shapes = {"input": {0: torch.export.Dim("batch", min=2)}}
    return torch.export.export(model, (x,), dynamic_shapes=shapes).module()(x[:3])


def in_fake_tensor_mode(device: str = "cpu") -> Any:
    with FakeTensorMode():
        product = torch.randn(1000, 1000, device=device) @ torch.randn(1000, 1000, device=device)
        assert "size=(1000, 1000)" in repr(product)  # for which modes are left for a moment
        product = product @ product
    assert product.shape == (1000, 1000)
    return torch.randn(8, 8, device=device)


def symbolic_graph(device: str = "cpu") -> Any:
    x = torch.randn(8, 8, device=device)
    return make_fx(lambda y: (y @ y).relu(), tracing_mode="symbolic")(x)(x)


def jvp(device: str = "cpu") -> Any:
    x = torch.randn(8, device=device)
    return torch.func.jvp(torch.sin, (x,), (x,))


def forward_derivatives(device: str = "cpu") -> Any:
    """Return what tangents that are all zero go through; they have no memory."""
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    x = torch.linspace(0, 1, 8, device=device)
    zero = torch._efficientzerotensor((3, 3), device=device)
    assert str(zero.device) == str(x.device)
    zeros = (zero + 1, zero @ torch.ones(3, 3, device=device), zero.clone() + 1)
    return torch.func.jvp(module, (x,), (x,)), torch.func.jacfwd(module)(x), zeros


def numbers_in_torchscript(device: str = "cpu") -> Any:
    """Return what TorchScript asks of tensors that are Python numbers."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.to(device) * 2
        if y.shape[0] > 1:
            y = y / 3
        return y.new_full((y.size(0) * 2,), 1.5)

    x = torch.ones(2, 3)  # what the graph says of a device holds when it runs
    return torch.jit.trace(doubled, x)(x)


def lazy(device: str = "cpu") -> Any:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).to(device)
    return model(torch.randn(1, 3, 8, 8, device=device))


def scripted(device: str = "cpu") -> Any:
    class Padded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            side = int(math.sqrt(x.size(1) * 2) + math.floor(4.5))
            classes = F.one_hot(torch.arange(x.size(0), device=x.device), num_classes=side)
            return x + torch.zeros(x.size(0), side, device=x.device) + classes.float()

    return torch.jit.script(Padded())(torch.randn(4, 8, device=device))


def jit_traced(device: str = "cpu") -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(device)
    x = torch.randn(2, 3, 8, 8, device=device)
    traced = torch.jit.trace(model, x)  # which runs it again and compares graphs and outputs
    assert "aten::_convolution" in str(traced.inlined_graph)
    for _ in range(3):  # constants of the graph are compared when it is optimized
        traced(x).sum().backward()


def frozen(device: str = "cpu") -> Any:
    traced = torch.jit.trace(nn.Linear(8, 8).to(device).eval(), torch.randn(4, 8, device=device))
    return torch.jit.freeze(traced)(torch.randn(2, 8, device=device))


PROGRAMS = [exported, exported_for_any_batch, frozen, in_fake_tensor_mode, symbolic_graph, jvp]
PROGRAMS += [forward_derivatives, lazy, scripted, jit_traced]


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_on_both_devices(program):
    if program is not lazy:  # oneDNN's workspaces depend on the host
        assert torchmem.trace(program, host="here").peak == torchmem.measure(program).peak
    torchmem.trace(lambda: program("cuda"), device="cuda")


def test_numbers_that_torchscript_asks_for_are_what_they_are() -> None:
    torchmem.trace(lambda: numbers_in_torchscript("cuda"), device="cuda")


def test_numbers_of_a_graph_that_autograd_saves_are_what_they_are() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2.0

    model, x = Doubled(4, 4), torch.randn(2, 4)
    traced = partial(torch.jit.trace, model, x)  # which compares outputs and numbers of graphs
    found = result_of(lambda: traced()(x).sum().item(), values="real")
    assert found == pytest.approx(model(x).sum().item())


def test_torchscript_knows_functions_that_are_replaced(device: str) -> None:
    """It finds operators by the identity of the functions."""
    modules = (torch, torch.linalg, torch.special, torch._C._nn, F, math)
    names = [(module, name) for module in modules for name in dir(module)]

    def known() -> dict[str, Any]:
        find = torch.jit._builtins._find_builtin
        return {f"{module.__name__}.{name}": find(getattr(module, name)) for module, name in names}

    real, found = known(), {}
    torchmem.trace(lambda: found.update(known()), device=device)
    assert found == real


@in_a_trace("cuda")
def test_torchscript_is_loaded_onto_the_gpu() -> None:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(1000, 1000).cuda()), file)
    file.seek(0)
    for device in ({"map_location": "cuda"}, {}):  # where it was
        before = torch.cuda.memory_allocated()
        loaded = torch.jit.load(file, **device)
        assert torch.cuda.memory_allocated() - before == 4_000_256 + 4_096
        assert loaded(torch.ones(2, 1000, device="cuda")).is_cuda
        file.seek(0)
        del loaded


def test_a_compiled_function_is_told_of_and_no_other() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    profile = torchmem.trace(lambda: compiled(torch.randn(4)), mode="eager")
    assert any("what torch.compile wraps" in warning for warning in profile.warnings)
    plain = torch.compiler.disable(lambda x: x * 2)
    assert not torchmem.trace(lambda: plain(torch.randn(4))).warnings


def test_a_module_that_torchscript_loads_is_counted_but_for_its_code(tmp_path: Path) -> None:
    file = str(tmp_path / "module.pt")
    torch.jit.script(nn.Linear(100, 100)).save(file)

    def step() -> None:
        torch.jit.load(file)(torch.ones(30, 100)).sum().backward()

    traced = torchmem.trace(step, host="here").figures()
    for name, nbytes in torchmem.measure(step).figures().items():
        # The texts of its code lie in memory of the allocator's.
        assert 0 <= nbytes - traced[name] < 2000
