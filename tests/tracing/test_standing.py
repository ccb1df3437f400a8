"""A fake GPU that stands between traces: what it says, what traces take of it, what is left."""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import UninitializedBuffer, UninitializedParameter
from torch.nn import functional as F

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import NoCudaError, UnknownValueError, UsageError
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from pytest_torchmem.tracing.layers import StandingGpu
from tests.processes import in_thread

KEPT = 2 * 32 * 2**20 + (0 if torch.__version__ >= "2.12" else 2**20)  # cuBLAS, cuBLASLt before
"""cuBLAS keeps this on an H100, for the program and for the autograd engine."""


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[StandingGpu]:
    made = StandingGpu("h100", limited=True, values=getattr(request, "param", "auto"))
    yield made
    made.close()


without_values = pytest.mark.parametrize("gpu", ["none"], indirect=True)


@pytest.fixture
def on_gpu(gpu: StandingGpu) -> Iterator[None]:
    """Let a test be one of a suite on fake cuda."""
    with gpu.on():
        yield


def step() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()


def replaced() -> list[object]:
    owners = (torch, torch.cuda, torch.Tensor, torch.UntypedStorage, nn.Module, torch.version)
    return [dict(vars(owner)) for owner in owners] + [torch.backends.cuda.is_built()]


def test_peaks_are_those_of_a_trace(gpu: StandingGpu) -> None:
    peak = trace(step, device="cuda", gpu="h100").replay
    assert peak is not None
    with gpu.on():
        step()
        assert torch.cuda.max_memory_allocated() == peak()["peak"].allocated
        assert torch.cuda.max_memory_reserved() == peak()["peak"].reserved
        assert torch.cuda.memory_allocated() == KEPT
        torch.cuda.reset_peak_memory_stats()
        step()
        assert torch.cuda.max_memory_allocated() == peak()["peak"].allocated


def test_nothing_is_left_between(gpu: StandingGpu) -> None:
    before = replaced()
    for _ in range(2):
        with gpu.on():
            assert torch.cuda.is_available()
            step()
        assert replaced() == before
        assert not torch.cuda.is_available()


def test_what_is_on_it_stays(gpu: StandingGpu) -> None:
    with gpu.on():
        tensor = torch.empty(1 << 20, device="cuda")
    with gpu.on():
        assert tensor.device == torch.device("cuda", 0)
        assert torch.cuda.memory_allocated() == 4 << 20
    del tensor
    with gpu.on():
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.memory_reserved() == 20 << 20
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_the_host_is_real(gpu: StandingGpu) -> None:
    with gpu.on():
        model = nn.Linear(4, 4)
        before = model(torch.ones(2, 4)).square().sum()
        before.backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
        assert model(torch.ones(2, 4)).square().sum() < before
        assert torch.equal(torch.eye(3).to_sparse().to_dense(), torch.eye(3))
        assert torch.func.vmap(torch.sum)(torch.ones(2, 3)).tolist() == [3, 3]
        result = torch.zeros(3)
        in_thread(lambda: result.add_(1))
    assert result.tolist() == [1, 1, 1]


def test_values_of_the_host_are_read_when_they_are_copied(gpu: StandingGpu) -> None:
    with gpu.on():
        numbers = torch.arange(4)
        first = numbers.cuda()
        numbers += 1
        numbers.numpy()[0] = 7
        assert numbers.cuda().tolist() == [7, 2, 3, 4]
        assert first.tolist() == [0, 1, 2, 3]
        numbers.copy_(first)
        assert numbers.tolist() == [0, 1, 2, 3]
    assert numbers.sum() == 6


@without_values
def test_unknown_values_on_the_host_are_not_taken_for_the_old_ones(gpu: StandingGpu) -> None:
    with gpu.on():
        target = torch.zeros(1000, 1000)
        target.copy_(torch.randn(1000, 1000, device="cuda"))
        assert repr(target).startswith("tensor(..., device='cpu'")
        assert target.device.type == "cpu"
    gpu.close()
    assert target.isnan().all()


def test_a_real_leaf_gets_its_gradient(on_gpu: None) -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).cuda().sum().backward()
    assert model.weight.grad.device.type == "cpu"


def test_out_of_memory_and_on(on_gpu: None) -> None:
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 100\.00 GiB"):
            torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 0
    step()


def test_a_trace_meets_what_stands(gpu: StandingGpu) -> None:
    with gpu.on():
        model = nn.Linear(256, 256).to("cuda")
        given = torch.zeros(2, 256, device="cuda")

    def body() -> None:
        model(given).sum().backward()

    def whole() -> None:
        model = nn.Linear(256, 256).to("cuda")
        model(torch.zeros(2, 256, device="cuda")).sum().backward()

    for _ in range(2):
        assert trace(body, device="cuda").peak == trace(whole, device="cuda").peak
        assert model.weight.grad is None
    with gpu.on():
        assert model.weight.device.type == "cuda"
        assert trace(body, device="cuda").peak == trace(whole, device="cuda").peak
        assert gpu.is_on
        assert trace(model, torch.zeros(2, 256)).peak == trace(nn.Linear(256, 256), given).peak
    assert trace(body, device="cuda").by_kind()["parameter"] == (256 * 256 + 256) * 4


def test_a_trace_leaves_what_stands_as_it_was(gpu: StandingGpu) -> None:
    with gpu.on():
        model = nn.BatchNorm1d(8).to("cuda")
        model(torch.ones(4, 8, device="cuda"))

    def body() -> None:
        for _ in range(3):
            model(torch.ones(4, 8, device="cuda"))
        assert model.num_batches_tracked.item() == 4
        model.to("cpu", torch.float64)

    trace(body, device="cuda")
    with gpu.on():
        assert model.num_batches_tracked.item() == 1
        assert model.weight.device.type == "cuda"
        assert model.weight.dtype is torch.float32


def test_a_trace_counts_what_it_is_told_of(gpu: StandingGpu) -> None:
    with gpu.on():
        held = torch.empty(1 << 20, device="cuda")

    def body() -> Tensor:
        return torch.empty(8, device="cuda")

    assert trace(body, device="cuda").peak == 32
    with gpu.presenting(gpu.live()):
        profile = trace(body, device="cuda")
        assert (profile.baseline, profile.peak) == (4 << 20, (4 << 20) + 32)
    del held


def test_what_dies_in_a_trace_is_freed_in_both(gpu: StandingGpu) -> None:
    held: list[Tensor] = []
    with gpu.on():
        held.append(torch.empty(1 << 20, device="cuda"))

    def body() -> None:
        held.clear()
        torch.empty(8, device="cuda")

    with gpu.presenting(gpu.live()):
        profile = trace(body, device="cuda")
    assert (profile.peak, profile.end) == (4 << 20, 0)
    with gpu.on():
        assert torch.cuda.memory_allocated() == 0


def test_a_trace_on_the_cpu_says_what_is_on_cuda(gpu: StandingGpu) -> None:
    with gpu.on():
        tensor = torch.empty(8, device="cuda")
    with pytest.raises(NoCudaError, match=r"test_standing\.py:\d+: a tensor is on cuda"):
        trace(lambda: tensor + 1)
    with pytest.raises(NoCudaError, match=r"the program asks for cuda, .*device=\"cuda\""):
        trace(lambda: torch.empty(8).cuda())
    with pytest.raises((RuntimeError, AssertionError)):  # as torch without a GPU
        trace(lambda: torch.empty(8, device="cuda"))


@pytest.mark.parametrize("other", ["mps", "cuda", "mtia"])
def test_devices_that_a_trace_does_not_model(device: str, other: str) -> None:
    """Also where C++ takes the device for initialised already."""
    if device == other:
        pytest.skip("this one it does")
    missing = torch.device(other)
    with pytest.raises(RuntimeError, match=rf"(not linked with support|asks) for {other}"):
        trace(lambda: torch.ops.aten.empty_strided([2], [1], device=missing), device=device)


def test_measuring_beside_it(gpu: StandingGpu) -> None:
    def body() -> None:
        nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()

    figures = measure(body).figures()
    with gpu.on():
        assert measure(body).figures() == figures
        with pytest.raises(UsageError, match="fake"):
            measure(body, device="cuda")


def test_two_of_them(gpu: StandingGpu) -> None:
    other = StandingGpu("a100-80gb")
    with gpu.on():
        tensor = torch.empty(1 << 20, device="cuda")
        with other.on():
            assert "A100" in torch.cuda.get_device_name()
            assert torch.cuda.memory_allocated() == 0
        assert "H100" in torch.cuda.get_device_name()
        assert torch.cuda.memory_allocated() == tensor.nbytes
    other.close()


def test_no_fake_gpu_in_a_trace(gpu: StandingGpu) -> None:
    def body() -> None:
        with gpu.on():
            pass

    with pytest.raises(UsageError, match="already running"):
        trace(body)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks")
def test_a_forked_process_does_not_see_it(gpu: StandingGpu) -> None:
    with gpu.on():
        process = os.fork()
        if not process:
            ok = not torch.cuda.is_available() and torch.ones(3).sum() == 3
            with gpu.on():
                ok = ok and torch.cuda.is_available()
            os._exit(0 if ok else 1)
        assert os.waitpid(process, 0)[1] == 0
        assert torch.cuda.is_available()


def test_it_does_not_grow(gpu: StandingGpu) -> None:
    held = []
    for _ in range(20):
        with gpu.on():
            step()
            held.append(torch.empty(8, device="cuda"))
            allocated = torch.cuda.memory_allocated()
            gpu.cut()
            assert torch.cuda.memory_allocated() == allocated
    assert allocated == KEPT + 20 * 512
    ledger = gpu._devices[0]
    assert len(ledger.entries) == len(ledger.events) == 2 + 20
    del held
    gpu.cut()
    assert len(ledger.entries) == 2
    with gpu.on():
        step()
        assert torch.cuda.memory_allocated() == KEPT


@without_values
def test_as_many_guesses_in_each_test(gpu: StandingGpu) -> None:
    with gpu.on():
        for _ in range(3):
            for _ in range(600):
                assert torch.randn(1000, device="cuda").sum() < 5
            gpu.cut()


def test_survivors_read_as_nan() -> None:
    gpu = StandingGpu("t4", values="none")
    with gpu.on():
        tensor = torch.randn(1000, 1000, device="cuda")
    gpu.close()
    assert tensor.isnan().all()
    with gpu.on():  # a closed one is never on again
        assert not torch.cuda.is_available()
    gc.collect()


def test_a_thread_of_a_pool_comes_back_with_the_gpu(gpu: StandingGpu) -> None:
    def made() -> torch.Tensor:
        return torch.ones(8, device="cuda")

    with ThreadPoolExecutor(1) as pool:
        with gpu.on():
            first = pool.submit(made).result()
            assert first.device.type == "cuda"
        assert pool.submit(lambda: torch.ones(2).sum().item()).result() == 2.0
        trace(lambda: torch.ones(3) + 1)
        with gpu.on():
            before = torch.cuda.memory_allocated()
            both = pool.submit(lambda: made() + first).result()
            assert both.device.type == "cuda"
            assert torch.cuda.memory_allocated() == before + 512
    with gpu.on():
        assert (both + 1).device.type == "cuda"


def test_what_is_known_is_lent_as_a_copy(gpu, monkeypatch, capsys):
    def budget(self: Values) -> ValuesBudget:
        return ValuesBudget(1 << 30, 0 if self is Values.ASKED_FOR else 10**9)

    monkeypatch.setattr(Values, "budget", budget)
    with gpu.on():
        lengths = torch.tensor([3, 5, 2], device="cuda")

    def program() -> None:
        print(lengths.tolist())
        lengths.add_(1)
        if torch.randn(200_000, device="cuda").sum() > 1e9:  # a second pass
            raise AssertionError
        assert torch.empty(int(lengths.max()), device="cuda").numel() == 6

    assert trace(program, device="cuda").values == "real"
    assert capsys.readouterr().out == "[3, 5, 2]\n" * 2
    with gpu.on():
        assert lengths.tolist() == [3, 5, 2]


@without_values
def test_a_value_that_a_fixture_did_not_keep(gpu: StandingGpu) -> None:
    with gpu.on():
        model = nn.Linear(64, 64, device="cuda")

    def program() -> None:
        if model(torch.ones(2, 64, device="cuda")).sum() > 0:
            model.zero_grad()

    with pytest.raises(UnknownValueError, match=r"fixture put on cuda.*values='none'"):
        trace(program, device="cuda")
    assert trace(program, device="cuda", values="none").warnings


def test_values_are_computed_as_far_as_the_budget_of_each_test(gpu, monkeypatch):
    monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(1 << 20, 1_000_000))
    with gpu.on():
        for _ in range(3):
            gpu.cut()
            model = nn.Linear(64, 64, device="cuda")
            before = model.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            losses = []
            for _ in range(3):
                loss = model(torch.ones(2, 64, device="cuda")).pow(2).sum()
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert losses[-1] != losses[0]
            assert not torch.equal(before, model.weight)
            large = torch.randn(1000, 1000, device="cuda")
            assert f"{large.sum().item():.0f}" == "nan"  # told, and nothing decided by it
            is_positive = large.sum() > 0
            for decision in (is_positive.__bool__, large.sum(0).cpu().numpy, large[0].tolist):
                with pytest.raises(UnknownValueError, match="a budget for each test goes"):
                    decision()


def test_a_suite_has_a_larger_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandingGpu("h100", limited=True, of_suite=True)
    with gpu.on():
        ones = torch.ones(1024, 1024, device="cuda")
        assert (ones @ ones)[5, 7] == 1024  # more than a billion operations
        monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(1 << 20, 1_000_000))
        gpu.cut()
        with pytest.raises(UnknownValueError, match="Run it with --torchmem-values=real"):
            bool((ones @ ones)[5, 7] == 1024)
    gpu.close()


@pytest.mark.parametrize("name", ["svdvals", "eigvalsh", "inv", "pinv", "matrix_exp", "slogdet"])
def test_operators_of_several_kernels_compute_what_comes_from_the_gpu(gpu, name):
    """What their bodies make on the host has no content of its own."""
    matrix = torch.eye(6) + torch.rand(6, 6) / 12
    matrix = matrix @ matrix.mT
    with gpu.on():
        found = getattr(torch.linalg, name)(matrix.cuda().cpu())
        torch.testing.assert_close(found, getattr(torch.linalg, name)(matrix))


def test_what_is_compiled_between_traces_is_compiled(gpu: StandingGpu) -> None:
    """Its graphs are the compiler's, and run operator by operator, on the GPU and on the host."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    given = torch.randn(3, 4)
    expected = layers(given)
    with gpu.on():
        assert torch._dynamo.explain(layers)(given).graph_count == 1
        compiled = torch.compile(layers, fullgraph=True)
        assert torch.equal(compiled(given), expected)
        compiled(given).sum().backward()
        layers.cuda()
        output = compiled(given.cuda())
        output.sum().backward()
        assert output.is_cuda
        assert layers[0].weight.grad.is_cuda
        assert torch.allclose(output.cpu(), expected)


def test_an_index_that_cpp_makes_is_beside_what_it_indexes(on_gpu: None) -> None:
    on_host, on_gpu = torch.ones(2, 3), torch.ones(2, 3, device="cuda")
    for x in (on_host, on_gpu, on_host):
        assert x[False, True, ...].shape == (0, 2, 3)
        x[True] = 2.0
        assert x[True].sum().item() == 12
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        on_host[torch.tensor([1], device="cuda")]


def test_a_list_in_itself_has_too_many_dimensions(on_gpu: None) -> None:
    numbers: list[object] = []
    numbers.append(numbers)
    with pytest.raises(ValueError, match="too many dimensions"):
        torch.tensor(numbers)


def _beside() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return operators that C++ makes of a factory first, which does not say for which device."""
    return {
        "combinations": torch.combinations,
        "feature_dropout": lambda x: F.dropout1d(x[None, None]),
        "fftfreq": lambda x: torch.fft.fftfreq(4, device=x.device) + x[0],
        "istft": lambda x: torch.istft(torch.ones(3, 9, dtype=torch.complex64, device=x.device), 4),
        "matrix_rank": lambda x: torch.linalg.matrix_rank(x[None]),
        "max_pool1d": lambda x: F.max_pool1d(x[None, None], 2),
        "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([x, x]),
        "quantile": lambda x: torch.quantile(x, 0.5),
        "vander": torch.vander,
    }


@pytest.mark.parametrize("name", _beside())
def test_what_cpp_makes_is_beside_its_argument(gpu: StandingGpu, name: str) -> None:
    function = _beside()[name]
    with gpu.on():
        x = torch.rand(4)
        torch.manual_seed(0)
        expected = function(x)
        for before, device in (("cuda", "cpu"), ("cpu", "cuda")):
            torch.ones(2, device=before) * 2
            torch.manual_seed(0)
            result = function(x.to(device))
            assert result.device.type == device
            if "dropout" not in name:  # the GPU has random numbers of its own
                assert torch.allclose(result.cpu(), expected)


def test_what_torchscript_has_written_down_runs(on_gpu: None, device: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 1.5 + 2 * torch.tensor([1.0, 2.0], device=x.device)

    x = torch.rand(2, device=device, requires_grad=True)
    traced = torch.jit.trace(step, (x,))  # which runs it again, and compares
    for _ in range(3):
        traced(x).sum().backward()
    assert x.grad.device.type == device


def test_modules_of_torchscript_are_called(on_gpu: None) -> None:
    x = torch.rand(2, 3, device="cuda")
    for made in (torch.jit.trace(nn.Linear(3, 3).cuda(), x), torch.jit.script(nn.ReLU())):
        assert nn.Sequential(made)(x).device.type == "cuda"


@pytest.mark.parametrize("kind", [UninitializedParameter, UninitializedBuffer])
def test_parameters_without_a_shape_are_copied(on_gpu: None, kind: Any) -> None:
    with torch.no_grad():
        lazy = {device: kind(device=device) for device in ("cpu", "cuda")}
        for source in lazy.values():
            for target in lazy.values():
                assert target.copy_(source) is target
        for device, one in lazy.items():
            half = one.half()
            assert (half.device.type, half.dtype) == (device, torch.float16)


def test_functions_of_cpp_about_streams_and_devices(gpu: StandingGpu) -> None:
    functions: Any = torch._C
    before_it = getattr(functions, "_cuda_setStream", None)  # builds without CUDA have none
    with gpu.on():  # as torch's own tests do on every GPU
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        of_stream = ("stream_id", "device_index", "device_type")
        functions._cuda_setStream(**{name: getattr(stream, name) for name in of_stream})
        functions._cuda_setDevice(0)
        assert torch.cuda.current_stream() == stream
        assert functions._cuda_getCurrentStream(0) == (stream.stream_id, 0, 1)
        torch.cuda.set_stream(before)
    assert getattr(functions, "_cuda_setStream", None) is before_it


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_of_half_with_a_float_result_has_values(gpu, function):
    host = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    weights = torch.arange(4.0)
    (function(host, -1, dtype=torch.float32) * weights).sum().backward()
    with gpu.on():
        x = host.detach().cuda().requires_grad_()
        result = function(x, -1, dtype=torch.float32)
        assert result.dtype == torch.float32
        (result * weights.cuda()).sum().backward()
        assert host.grad is not None
        torch.testing.assert_close(x.grad.cpu(), host.grad, atol=1e-2, rtol=1e-2)


def test_a_tensor_gets_the_shape_of_another(on_gpu: None) -> None:
    layer = nn.CrossMapLRN2d(3).cuda()  # by resize_as_
    x = torch.ones(2, 3, 4, 4, device="cuda")
    before = torch.cuda.memory_allocated()
    made = x.new().resize_as_(x)
    assert torch.cuda.memory_allocated() - before == 512
    assert (made.shape, made.device) == (x.shape, x.device)
    assert layer(x).shape == x.shape


def test_what_is_wrong_is_told_where_it_is_known(on_gpu: None) -> None:
    for device in ("cpu", "cuda"):
        rows = torch.tensor([0, 1, 2], device=device)
        values = torch.ones(2, device=device)
        made = torch.sparse_csr_tensor(rows, rows[:2], values, (2, 2), check_invariants=True)
        assert made.values().device.type == device
        with pytest.raises(RuntimeError, match="is not satisfied"):
            torch.sparse_csr_tensor(rows + 1, rows[:2], values, (2, 2), check_invariants=True)
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite"):
            torch.linalg.cholesky(-torch.eye(3, device=device))


def test_a_copy_by_temporaries_reaches_the_host(gpu: StandingGpu) -> None:
    with gpu.on():
        image = torch.full((2, 3, 8, 6), 7.0)
        image[:1, :, :4].copy_(torch.full((1, 3, 4, 6), 2.0, device="cuda"), non_blocking=True)
        image[1, :, 4:] = torch.full((3, 4, 6), 3.0, device="cuda")
    assert image[0, :, :4].unique().tolist() == [2.0]
    assert image[1, :, 4:].unique().tolist() == [3.0]
    assert image[0, :, 4:].unique().tolist() == image[1, :, :4].unique().tolist() == [7.0]


def test_tensors_on_the_gpu_are_put_together_as_a_nested_one(on_gpu: None) -> None:
    """Its table of sizes is on the host, where everything is real."""
    parts = [torch.full((rows, 4), float(rows), device="cuda") for rows in (3, 5)]
    nested = torch.nested.nested_tensor(parts)
    assert torch.nn.functional.silu(nested).is_cuda
    assert [part.shape for part in nested.unbind()] == [(3, 4), (5, 4)]
    assert torch.nested.to_padded_tensor(nested, 0.0)[:, :, 0].sum().item() == 3 * 3 + 5 * 5


class Wrapped(Tensor):
    """As users write subclasses: every operator is handed on to what it holds."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def held(one: Any) -> Any:
            return one.inner if isinstance(one, Wrapped) else one

        return cls(func(*[held(one) for one in args], **(kwargs or {})))


def moves_of_a_subclass() -> None:
    host, gpu = Wrapped(torch.ones(3)), Wrapped(torch.ones(3, device="cuda"))
    back = [gpu.cpu(), gpu.to("cpu", torch.float64), host.cuda().cpu()]
    assert [made.device.type for made in back] == ["cpu"] * 3
    assert [made.inner.device.type for made in back] == ["cpu"] * 3  # type: ignore[attr-defined]
    assert (host.cuda() + gpu).inner.is_cuda  # type: ignore[attr-defined]
    assert torch.ops.aten._to_copy.default(torch.ones(3), device="cuda").is_cuda


def test_subclasses_move_what_they_hold(gpu: StandingGpu) -> None:
    trace(moves_of_a_subclass, device="cuda")
    with gpu.on():
        moves_of_a_subclass()
