"""Operators that torch does not come with, and kernels that cannot be traced."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError, UnsupportedOperatorError, UsageError
from pytest_torchmem.operators.custom_operators import OperatorModel, registered_operators
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.targets.gpus import Gpu, find_gpu, registered_gpus
from pytest_torchmem.targets.host import Host
from tests.results import in_a_trace, on_fake_cuda


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
    x.fill_(value)


@torch.library.custom_op("torchmem_tests::normalized", mutates_args=("statistics",))
def normalized(x: Tensor, statistics: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Write to an argument and return a list."""
    raise AssertionError


@normalized.register_fake
def _(x: Tensor, statistics: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(part) for part in parts]


@torch.library.custom_op("torchmem_tests::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    """Cast by autocast."""
    raise AssertionError


product.register_fake(lambda x, y: x.new_empty(x.size(0), y.size(1)))
product.register_autograd(
    lambda ctx, grad: (product(grad, ctx.saved_tensors[1].t()), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
product.register_autocast("cuda", torch.bfloat16)

torch.library.define("torchmem_tests::pair", "(Tensor x) -> (Tensor, Tensor)")


@torch.library.register_fake("torchmem_tests::pair")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, *x.shape))


torch.library.define("torchmem_tests::undescribed", "(Tensor x) -> Tensor")
undescribed = torch.ops.torchmem_tests.undescribed.default


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


def test_lists_and_written_arguments(device: str) -> None:
    def program() -> None:
        x = torch.zeros(256, device=device)
        statistics = torch.zeros(2, dtype=torch.int64, device=device)
        first, second = normalized(x, statistics, [x, x[:64]])
        assert (first.shape, second.shape) == ((256,), (64,))
        with pytest.raises(UnknownValueError):
            statistics.tolist()  # known as zeros until the operator wrote to it

    assert trace(program, device=device).peak == 1024 + 16 + 1024 + 256


@in_a_trace("cuda")
def test_a_custom_operator_is_cast_by_autocast() -> None:
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        output = product(x, x)
        with torch.autocast("cuda", enabled=False):
            plain = product(x, x)
    on_host = product(torch.ones(8, 8), torch.ones(8, 8))
    output.float().sum().backward()
    assert output.dtype is torch.bfloat16
    assert plain.dtype is on_host.dtype is x.grad.dtype is torch.float32


def test_a_custom_operator_that_nobody_described(device: str) -> None:
    message = r'undescribed.*register_fake\("torchmem_tests::undescribed".*OperatorModel'
    with pytest.raises(UnsupportedOperatorError, match=message):
        trace(lambda: undescribed(torch.ones(3, device=device)), device=device)


def test_a_custom_operator_is_described_from_outside(device: str) -> None:
    def peak() -> int:
        return trace(lambda: undescribed(torch.ones(3, device=device)), device=device).peak

    def workspace(machine: Any, outputs: Tensor, x: Tensor) -> int:
        assert isinstance(machine, Gpu if device == "cuda" else Host)
        return 100 * outputs.element_size()

    models = (
        OperatorModel(undescribed, lambda x: x.new_empty(5), workspace),
        OperatorModel(undescribed, workspace=lambda machine, out, x: 7),
    )
    with registered_operators(*models[:1]):
        assert peak() == 12 + 20 + 400
    with registered_operators(OperatorModel(undescribed, lambda x: x.new_empty(5))):
        assert peak() == 12 + 20
    with pytest.raises(UnsupportedOperatorError), registered_operators(models[1]):
        trace(lambda: undescribed(torch.ones(3)), values="none")
    with pytest.raises(UnsupportedOperatorError):
        peak()


def test_an_operator_of_torch_is_described_anew() -> None:
    def peak() -> int:
        return trace(lambda: torch.ones(4, 4, device="cuda").cumsum(0), device="cuda").peak

    before, options = peak(), {"workspace": lambda gpu, out, *_: 4096, "devices": ("cuda",)}
    with registered_operators(OperatorModel("aten::cumsum", **options)):
        assert peak() == 128 + 4096
    assert peak() == before


def peaks(program: Any, *models: OperatorModel) -> MemoryProfile:
    with registered_operators(*models):
        return trace(program, device="cuda")


def test_operations_are_counted_by_a_description() -> None:
    def program() -> None:
        scaled(torch.empty(256), 2.0)

    before = trace(program)
    model = OperatorModel(scaled, flops=lambda outputs, x, factor: 3 * x.numel())
    with registered_operators(model):
        after = trace(program)
    assert before.node_table().total().fwd_flops == 0
    assert after.node_table().total().fwd_flops == 3 * 256
    assert after.peak == before.peak


def test_a_kernel_that_calls_others_is_described_by_them() -> None:
    def program() -> None:
        scaled(torch.empty(256, device="cuda"), 2.0)

    def decomposition(machine: Gpu, x: Tensor, factor: float) -> Tensor:
        partial = x.new_empty((4, *x.shape))
        del partial
        return torch.empty_like(x)

    plain = peaks(program)
    told = peaks(program, OperatorModel("torchmem_tests::scaled", decomposition=decomposition))
    assert plain.peak == 2 * 1024
    assert (told.peak, told.unknown_workspaces) == ((1 + 4) * 1024, ())


def test_a_composite_operator_takes_another_path_on_cuda() -> None:
    def program() -> None:
        torch.nn.functional.linear(torch.empty(8, 8, device="cuda"), torch.empty(8, 8).cuda())

    def path(call: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return call() + 0

    def made(*models: OperatorModel) -> list[str]:
        return [one.origin.operator for one in peaks(program, *models).timeline.allocations]

    model = OperatorModel("aten::linear", path=path, devices=("cuda",))
    assert made(model) == [*made(), "aten::add.Tensor"]


def pair() -> None:
    torch.ops.torchmem_tests.pair(torch.empty(64, device="cuda"))


def sizes(*models: OperatorModel) -> list[int]:
    return [one.nbytes for one in peaks(pair, *models).timeline.allocations]


def test_outputs_are_made_in_the_order_that_is_told() -> None:
    assert sizes() == [256, 256, 512]
    told = OperatorModel("torchmem_tests::pair", order=(1, 0), takes_nothing=True)
    assert sizes(told) == [256, 512, 256]
    assert peaks(pair).unknown_workspaces == ("torchmem_tests::pair",)
    assert peaks(pair, told).unknown_workspaces == ()


def test_outputs_on_the_host_are_booked_there() -> None:
    assert sizes(OperatorModel("torchmem_tests::pair", host_outputs=(1,))) == [256, 256]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OperatorModel("aten::mm"), "give meta=, workspace= or another aspect"),
        (OperatorModel("aten::mm", decomposition=3), "decomposition=3 is not a function"),
        (OperatorModel("aten::mm", workspace=len, takes_nothing=True), "not both"),
        (OperatorModel("aten::linear", flops=len), "is a composite of other operators"),
        (OperatorModel("aten::linear", path=len), r"add devices=\('cuda',\)"),
        (OperatorModel("aten::mm", path=len, devices=("cuda",)), "has a kernel of its own"),
        (OperatorModel("aten::linear", order=(0,)), "is a composite of other operators"),
    ],
)
def test_what_cannot_be_described_is_refused(model: OperatorModel, message: str) -> None:
    with pytest.raises(UsageError, match=message), registered_operators(model):
        pass


def test_a_kernel_in_python_is_what_it_calls() -> None:
    """Nobody called ``register_fake``: the function is called, as it is for real."""
    calls: list[str] = []

    @torch.library.custom_op("torchmem_tests::centred", mutates_args=("mean",))
    def centred(x: Tensor, mean: Tensor) -> list[Tensor]:
        calls.append(x.device.type)
        total = x.sum(0)
        mean.copy_(total / len(x))
        return [x - mean, x[x[:, 0] > 0]]

    with torch.library._scoped_library("torchmem_tests_python", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: (x + x) * 1, "CPU")
        library.impl("doubled", lambda x: x * 2, "CUDA")

        def program(device: str = "cpu") -> list[Tensor]:
            x, mean = torch.arange(-4.0, 4, device=device).reshape(4, 2), torch.zeros(2).to(device)
            first, second = centred(x, mean)
            assert (second.shape, mean.tolist()) == ((1, 2), [-1.0, 0.0])
            return [first, second, torch.ops.torchmem_tests_python.doubled(first)]

        profile = trace(program, values="real", host="here")
        assert (profile.peak, profile.unknown_workspaces) == (measure(program).peak, ())
        trace(program, "cuda", device="cuda")
    assert calls == ["cpu", "cpu", "cuda"]


def test_where_register_fake_cannot_say_the_kernel_shows(device: str) -> None:
    """For sizes that depend on data, and where it asserts that tensors are on a GPU."""

    @torch.library.custom_op("torchmem_tests::positives", mutates_args=())
    def positives(x: Tensor) -> Tensor:
        return torch.from_numpy(x.cpu().numpy()[x.cpu().numpy() > 0]).to(x.device)

    @positives.register_fake
    def _(x: Tensor) -> Tensor:
        assert x.device.type == device
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    def program() -> None:
        assert positives(torch.arange(-4.0, 4, device=device)).tolist() == [1, 2, 3]

    assert trace(program, device=device).peak == 8 * 4 + 3 * 4


def test_gpus_can_be_added() -> None:
    mine = Gpu("mine-1", "My GPU", (8, 9), 20 * 1024**3, 100, 1536)
    with registered_gpus(mine):
        assert find_gpu("MINE 1") is mine
        assert on_fake_cuda(torch.cuda.get_device_name, gpu="mine-1") == "My GPU"
        with pytest.raises(UsageError, match="taken"), registered_gpus(mine):
            pass
    with pytest.raises(UsageError, match="not a known GPU"):
        find_gpu("mine-1")
    for name, capability, memory in (("h100", (9, 0), 1), ("x", (3, 0), 1), ("x", (9, 0), 0)):
        wrong = Gpu(name, "", capability, memory, 1, 1)
        with pytest.raises(UsageError, match="cannot be added"), registered_gpus(wrong):
            pass


def test_a_body_in_python_is_differentiated_through_each_time() -> None:
    library = torch.library.Library("torchmem_tests_bodies", "DEF")
    library.define("scale(Tensor x, float factor) -> Tensor")
    library.impl("scale", lambda x, factor: x * factor, "CompositeExplicitAutograd")

    def program() -> None:
        for _ in range(3):
            weight = torch.ones(4, requires_grad=True)
            torch.ops.torchmem_tests_bodies.scale(weight, 2.0).sum().backward()
            assert weight.grad.sum().item() == 8.0

    trace(program)
    library._destroy()
