"""What a program compiles is profiled as compiled: as the real allocator counts it."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.compiled_autograd import _enable
from torch._inductor import compile_fx
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import MemoryProfile, measure, trace
from pytest_torchmem.torch_private import compiler, inductor
from pytest_torchmem.tracing.compiled import Compiled
from tests.modules import Parts
from tests.processes import in_thread
from tests.results import on_fake_cuda, result_of


class Net(nn.Module):
    """What Inductor fuses, and what it leaves to kernels of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 8)
        self.norm = nn.LayerNorm(128)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(nn.functional.gelu(self.first(x))).sin().exp()).softmax(-1)


class Breaks(Net):
    """A graph before and one after what Dynamo does not follow."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        torch._dynamo.graph_break()
        return self.second(x * 2).tanh()


def program(build, device="cpu", **options) -> Callable[[], Any]:
    def step() -> object:
        torch.manual_seed(0)
        model = build().to(device)
        compiled = torch.compile(model, **options)
        for _ in range(3):
            compiled(torch.randn(64, 32, device=device)).square().sum().backward()
        return model

    return step


def as_measured(profile: MemoryProfile, step: Callable[[], Any]) -> bool:
    torch._dynamo.reset()
    measured = measure(step)
    names = ("peak", "end")
    return all(getattr(measured, name) == getattr(profile, name) for name in names)


@pytest.mark.parametrize(("build", "backend"), [(Net, "inductor"), (Breaks, "aot_eager")])
def test_the_real_allocator_counts_the_same(build: Callable[[], nn.Module], backend: str) -> None:
    torch._dynamo.reset()
    step = program(build, backend=backend)
    profile = trace(step, host="here")
    assert profile.level == ("inductor" if backend == "inductor" else "aot")
    assert not profile.warnings
    assert as_measured(profile, step)
    assert profile.figures() == trace(step, host="here").figures()


def test_numbers_that_compiled_code_keeps_are_counted() -> None:
    def step() -> object:
        weight = torch.ones(8, 8, requires_grad=True)
        compiled = torch.compile(lambda x: (0.5 * x).sum())
        compiled(weight).backward()
        return compiled

    # The Python number that autograd saves in the graph of Dynamo.
    assert trace(step).end == 8


def test_fusion_needs_less_than_operators_one_by_one() -> None:
    fused, eager = (trace(Net(), torch.randn(64, 32), mode=mode) for mode in ("inductor", None))
    assert fused.peak < eager.peak
    assert (fused.level, eager.level) == ("inductor", "eager")


def test_buffers_have_the_operators_that_they_are_for() -> None:
    profile = trace(Net(), torch.randn(64, 32), mode="inductor")
    assert profile.level == "inductor"
    origins = {found.origin for found in profile.timeline.allocations}
    assert any("gelu" in one.operator or "erf" in one.operator for one in origins)
    lines = {one.line for one in origins if "erf" in one.operator}
    assert lines
    assert all("test_compiled.py:" in line for line in lines)


def test_a_graph_break_makes_several_graphs() -> None:
    profile = trace(program(Breaks), mode="aot")
    assert profile.level == "aot"
    assert len(profile.graphs) == 4


@pytest.mark.parametrize("mode", ["eager", "aot"])
def test_a_level_can_be_asked_for(mode: str) -> None:
    profile = trace(program(Net), mode=mode)
    assert profile.level == mode
    assert any("torch.compile" in one for one in profile.warnings) == (mode == "eager")


def test_on_fake_cuda_the_kernels_are_those_of_triton() -> None:
    pytest.importorskip("triton")
    profile = trace(program(Net, "cuda"), device="cuda", gpu="h100")
    eager = trace(program(Net, "cuda"), device="cuda", gpu="h100", mode="eager")
    assert (profile.level, profile.warnings) == ("inductor", ())
    assert profile.peak < eager.peak
    # What Inductor remembers of a GPU is not for the next trace, nor for the machine.
    assert not torch.utils._triton.has_triton()
    assert trace(program(Net, "cuda"), device="cuda", gpu="h100").figures() == profile.figures()


def test_what_cannot_be_lowered_runs_as_graphs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise NotImplementedError("no kernel here. More about it")

    monkeypatch.setattr("pytest_torchmem.torch_private.inductor.compile", fails)
    profile = trace(program(Net))
    assert profile.level == "aot"
    assert any("did not lower them (no kernel here)" in one for one in profile.warnings)


def test_what_decides_by_the_device_takes_the_way_of_the_gpu() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bias = torch.zeros(8, device="cuda")
            return (x.to("cuda") + bias) * (2 if x.is_cuda and x.device.type == "cuda" else y)  # noqa: F821

    def step() -> None:
        compiled = torch.compile(Decides(), backend="aot_eager", fullgraph=True)
        compiled(torch.ones(4, 8, device="cuda"))

    assert trace(step, device="cuda").level == "aot"


class Graphs(list[Any]):
    """A backend that keeps graphs, and runs them as they are."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.append(graph)
        return graph


def test_compiled_code_is_not_compiled_anew_in_every_step() -> None:
    graphs = Graphs()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    hooked = model[0].register_forward_hook(lambda module, given, made: made * 2)

    def step() -> None:
        compiled = torch.compile(model, backend=graphs)
        for _ in range(4):
            compiled(torch.ones(2, 8))

    trace(step)
    hooked.remove()
    assert len(graphs) == 1


def test_nothing_of_it_outlives_the_trace() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() + 1).cos()

    compiled = torch.compile(function, backend="aot_eager")
    x = torch.randn(16)
    expected = function(x)
    torch._dynamo.reset()
    assert compiled(x).equal(expected)  # compiled for real
    patched = torch._dynamo.eval_frame._callback_from_stance
    trace(lambda: compiled(torch.randn(16)), device="cpu")
    trace(lambda: compiled(torch.randn(5)))
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
    assert torch._dynamo.eval_frame._callback_from_stance is patched
    assert compiled(x).equal(expected)
    # What a trace has seen makes no size dynamic.
    trace(lambda: torch.compile(Net(), backend="aot_eager")(torch.randn(5, 32)))
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(Net.forward.__code__)


def test_tensors_of_compiled_code_are_gone() -> None:
    def step() -> weakref.ref[Any]:
        model = Net()
        torch.compile(model, backend="aot_eager")(torch.randn(4, 32)).sum().backward()
        return weakref.ref(model.first.weight)

    weight = result_of(step)
    gc.collect()
    assert weight() is None


def softmax_under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return (x @ x).softmax(-1)


@pytest.mark.parametrize(
    "function",
    [
        softmax_under_autocast,  # to float32, on the device that C++ has the matrix on
        lambda x: torch.nn.functional.one_hot(x.long().clamp(0, 7), 8) * x.sum(),  # a mask of C++
        lambda x: x[torch.tensor([0, 2], device="cuda")],  # zeros of the backward's formula
        lambda x: x.to(torch.bfloat16).float(),  # back to the type, and the device, of C++
    ],
)
def test_what_cpp_makes_beside_tensors_of_the_gpu_is_there_too(function):
    pytest.importorskip("triton")

    def step() -> None:
        x = torch.ones(16, 16, device="cuda", requires_grad=True)
        torch.compile(function)(x).sum().backward()

    profile = trace(step, device="cuda", gpu="h100")
    assert (profile.level, profile.warnings) == ("inductor", ())


def test_the_gradient_of_a_weight_on_the_host_is_copied_back_to_it() -> None:
    def step() -> None:
        weight = torch.ones(16, 16, requires_grad=True)
        x = torch.ones(16, 16, device="cuda", requires_grad=True)
        torch.compile(lambda: x @ weight.to("cuda"))().sum().backward()

    _, backward = trace(step, device="cuda", mode="aot").graphs
    copies = backward.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert [node.kwargs["device"].type for node in copies] == ["cpu"]


def test_sizes_that_are_dynamic_stay_so() -> None:
    graphs = Graphs()

    def step() -> None:
        compiled = torch.compile(lambda x: x.sin().sum(), backend=graphs, dynamic=True)
        for size in (4, 8, 16):
            compiled(torch.randn(size, 32))

    trace(step)
    assert len(graphs) == 1


def test_layers_that_are_compiled_one_by_one_share_their_code() -> None:
    def step() -> None:
        limit = torch._dynamo.config.recompile_limit
        layers = [nn.Linear(8, 8) for _ in range(limit + 2)]
        x = torch.ones(2, 8)
        for layer in layers:
            x = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)

    profile = trace(step)
    assert (profile.level, profile.warnings) == ("aot", ())


def test_of_what_no_graph_is_made_the_profile_says_so() -> None:
    def step() -> None:
        compiled = torch.compile(nn.LSTM(32, 8), backend="aot_eager")
        torch.compile(lambda x: x.sin(), backend="aot_eager")(torch.ones(3))
        compiled(torch.randn(3, 2, 32))

    def refuses(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such graph here. More about it")

    (warning,) = trace(lambda: torch.compile(torch.sin, backend=refuses)(torch.ones(3))).warnings
    assert warning.endswith("(no such graph here)")
    profile = trace(step)
    assert profile.level == "eager"
    (warning,) = profile.warnings
    assert "makes no graph of it" in warning
    with torch.compiler.set_stance("force_eager"):
        assert not trace(step).warnings  # as the program wants it


def test_the_level_is_that_of_the_lowest_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Compiled._by_inductor
    graphs = []

    def fails_first(self: Compiled, *args: Any) -> Any:
        graphs.append(args)
        if len(graphs) == 1:
            raise NotImplementedError("no kernel here")
        return original(self, *args)

    monkeypatch.setattr(Compiled, "_by_inductor", fails_first)

    def step() -> None:
        compiled = torch.compile(torch.sin, dynamic=False)
        for size in (4, 8):
            compiled(torch.randn(size))

    assert trace(step).level == "aot"
    assert len(graphs) == 2


def test_a_thread_compiles_as_well() -> None:
    def step() -> None:
        compiled = torch.compile(lambda x: x.sin().cos())
        in_thread(lambda: compiled(torch.randn(8, 32)))

    profile = trace(step)
    assert (profile.level, profile.warnings) == ("inductor", ())


def test_the_state_that_a_compiled_step_begins_with_is_counted(device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    model = nn.Linear(32, 32)
    brought = torch.optim.AdamW(model.parameters())

    def step() -> object:
        made = nn.Linear(32, 32, device=device)
        optimizer = torch.optim.AdamW(made.parameters()) if device == "cuda" else brought
        compiled = torch.compile(lambda: optimizer.step())
        for _ in range(2):
            used = made if device == "cuda" else model
            used(torch.ones(8, 32, device=device)).sum().backward()
            compiled()
            optimizer.zero_grad()
        return optimizer

    profile = trace(step, device=device)
    assert (profile.level, profile.warnings) == ("inductor", ())
    assert profile.optimizer_peak is not None
    states = [found for found in profile.live_at_peak("optimizer") if found.nbytes == 32 * 32 * 4]
    assert len(states) >= 4  # the weight, its gradient and two averages
    assert not brought.state


def test_modules_that_are_made_in_compiled_code_do_not_break_its_graph(device: str) -> None:
    class Sliced(Parts):  # as models of transformers choose their layers
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    def step() -> None:
        model = Sliced(layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3))).to(device)
        compiled = torch.compile(model, fullgraph=True)
        compiled(torch.ones(2, 8, device=device)).sum().backward()

    assert trace(step, device=device, mode="aot").level == "aot"


def test_compiled_code_is_told_of_the_fake_gpu() -> None:
    def ask(x: Tensor) -> tuple[Tensor, Any]:
        about = torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda.current_device()
        return x + 1, (*about, torch.accelerator.is_available())

    answers = []

    def step() -> None:
        for one in (ask, torch.compile(ask, fullgraph=True)):
            answers.append(one(torch.ones(8, device="cuda"))[1])

    profile = trace(step, device="cuda", mode="aot")
    assert answers == [(True, True, 0, True)] * 2
    assert profile.level == "aot"


def test_the_compiler_makes_its_tables_anew_in_a_trace() -> None:
    """As ``init_process_group`` has it; what it then lists is torch's own, also afterwards."""

    def is_there(x: Tensor) -> Tensor:
        return x + torch.cuda.is_available()

    def step() -> None:
        trace_rules.clear_lru_cache()
        torch.func.linearize(torch.sin, torch.ones(2, device="cuda"))
        torch.compile(is_there, fullgraph=True)(torch.ones(2, device="cuda"))

    assert trace(step, device="cuda", mode="aot").level == "aot"
    assert torch.cuda.is_available in trace_rules.get_torch_obj_rule_map()
    assert torch.compile(is_there, fullgraph=True, backend="eager")(torch.zeros(())) == 0


def test_compiled_code_makes_streams_and_waits() -> None:
    def double(x: Tensor) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            doubled = x * 2
        torch.cuda.current_stream().wait_stream(stream)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        torch.cuda.synchronize()
        return doubled + torch.cuda.get_device_properties(x.device).major

    def step() -> float:
        return compiled(torch.ones(1, device="cuda")).item()

    compiled = torch.compile(double, fullgraph=True)
    assert on_fake_cuda(step, gpu="h100", mode="aot") == 11


@pytest.mark.parametrize("values", ["auto", "real"])
def test_a_program_that_decides_by_computed_values_runs_as_graphs(values: str) -> None:
    runs = []

    def step() -> None:
        runs.append(1)
        compiled = torch.compile(lambda x: x.sin() + 1)
        if compiled(torch.ones(64)).sum() > 0:
            torch.zeros(1000)

    profile = trace(step, values=values)
    assert profile.level == "aot"
    (warning,) = (one for one in profile.warnings if "did not lower" in one)
    assert "decides by values" in warning
    assert any(found.nbytes == 4000 for found in profile.timeline.allocations)
    told = trace(lambda: print(torch.compile(torch.sin)(torch.ones(4)).sum().item()), values=values)
    assert told.values == "in part"


@pytest.mark.parametrize("values", ["auto", "none"])
def test_a_backward_that_cannot_be_lowered_runs_as_a_graph(monkeypatch, values):
    inductor.prepare()
    original = compile_fx.compile_fx_inner

    def fails_in_backward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            raise NotImplementedError("no such backward. More about it")
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails_in_backward)
    profile = trace(Net(), torch.randn(64, 32), mode="inductor", values=values)
    assert profile.level == "aot"
    assert any("no such backward" in one for one in profile.warnings)


def test_random_state_of_checkpoints_is_kept_by_generators_of_the_gpu() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        attended = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return nn.functional.dropout(attended, 0.1).relu()

    def step() -> None:
        shape = (2, 4, 64, 32)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(checkpoint)
        compiled(attend, x, use_reentrant=False).sum().backward()

    profile = trace(step, device="cuda", gpu="a100")
    assert (profile.level, profile.warnings) == ("inductor", ())


def test_compiled_autograd_is_profiled_as_compiled(device: str) -> None:
    """Its graph makes one gradient beside its parameter, and adds to the other."""

    def step() -> object:
        made, added = (nn.Parameter(torch.ones(8, device=device)) for _ in range(2))
        added.grad = torch.ones_like(added)
        x = torch.randn(2, 4, 16, 8, device=device) * made + added
        loss = nn.functional.scaled_dot_product_attention(x, x, x).square().sum()
        with _enable(torch.compile(backend="aot_eager")):
            loss.backward()
        devices.update(one.grad.device.type for one in (made, added) if one.grad is not None)
        return made, added

    devices: set[str] = set()
    profile = trace(step, device=device, **({"host": "here"} if device == "cpu" else {}))
    assert (profile.level, profile.warnings, devices) == ("aot", (), {device})
    if device == "cpu":
        assert as_measured(profile, step)


def test_what_a_compilation_takes_for_a_moment_is_in_neither_figure() -> None:
    """States of random generators; and an optimizer that is compiled does not live on."""
    refs: list[weakref.ref[Any]] = []

    def step() -> None:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
        forward = torch.compile(lambda x: layer(x), backend="aot_eager")
        update = torch.compile(lambda: optimizer.step(), backend="aot_eager")
        for _ in range(2):
            with _enable(torch.compile(backend="aot_eager")):
                forward(torch.ones(4, 8)).sum().backward()
            update()
            optimizer.zero_grad()
        refs.append(weakref.ref(optimizer))

    profile = trace(step, host="here")
    assert as_measured(profile, step)
    assert profile.optimizer_peak
    assert [one() for one in refs] == [None, None]


def test_a_compiled_function_that_calls_a_module_is_measured_as_one_graph() -> None:
    def step() -> None:
        layer = nn.Linear(8, 8)

        def forward(x: Tensor) -> Tensor:
            made = layer(x)
            torch._dynamo.graph_break()
            return made.exp()

        compiled = torch.compile(forward, backend="aot_eager")
        for _ in range(2):
            compiled(torch.ones(4, 8)).sum().backward()

    assert as_measured(trace(step, host="here"), step)


def test_modules_of_a_compiled_function_are_gone_after_a_measured_step() -> None:
    """Dynamo's cycles of references do not hold what a measurement calls modules by."""

    def step() -> None:
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, x: Tensor) -> Tensor:
                context.save_for_backward(x)
                return x * x

            @staticmethod
            def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
                return 2 * gradient * context.saved_tensors[0]

        inner = nn.Linear(16, 16)
        compiled = torch.compile(lambda x: Square.apply(inner(x)).sum(), backend="aot_eager")  # type: ignore[no-untyped-call]
        compiled(torch.ones(4, 16)).backward()

    gc.disable()
    try:
        assert trace(step, host="here").end == measure(step).end == 0
    finally:
        gc.enable()


def test_on_fake_cuda_what_is_on_the_host_is_compiled_for_the_host() -> None:
    def step() -> None:
        query, mask = torch.randn(1, 2, 4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool)
        attend = nn.functional.scaled_dot_product_attention
        torch.compile(attend, backend="eager", fullgraph=True)(query, query, query, mask)

    profile = trace(step, device="cuda", gpu="h100")
    assert profile.peak == 0
    (told,) = profile.warnings
    assert told.startswith("nothing was allocated on cuda")


def test_reduce_overhead_takes_what_it_takes_on_the_cpu_and_says_what_is_missing_on_cuda() -> None:
    profile = trace(program(Net, mode="reduce-overhead"))
    assert (profile.level, profile.warnings) == ("inductor", ())
    assert profile.figures() == trace(program(Net)).figures()
    pytest.importorskip("triton")
    on_gpu = trace(program(Net, "cuda", mode="reduce-overhead"), device="cuda", gpu="h100")
    assert on_gpu.level == "inductor"
    assert any("private pools" in one for one in on_gpu.warnings)


def test_what_inductor_leaves_to_aten_is_copied_to_the_device(device: str) -> None:
    """Complex numbers of a rotary embedding, which it calls ``prims::device_put`` on."""

    def program() -> None:
        turns = torch.polar(torch.ones(64, 8), torch.zeros(64, 8))
        put = torch.ops.prims.device_put(turns, torch.device(device))
        assert put.device.type == device
        put.real.add_(1)

    assert 64 * 8 * 8 in [one.nbytes for one in trace(program, device=device).timeline.allocations]


def test_a_number_that_is_not_known_may_be_given_to_compiled_code(device: str) -> None:
    """Dynamo asks for numbers on the host of 64 bits when it makes fake tensors of them."""

    def step() -> None:
        total = nn.Linear(4, 4, device=device)(torch.randn(4, 4, device=device)).sum()
        number = total.detach().cpu().double()
        x = torch.randn(8, device=device, requires_grad=True)
        torch.compile(lambda x, number: (x * number).sum())(x, number).backward()

    profile = trace(step, device=device, values="none", mode="aot")
    assert (profile.level, profile.warnings) == ("aot", ())
    assert profile.figures() == trace(step, device=device, mode="aot").figures()


@pytest.mark.parametrize("prepare", [compiler.prepare, inductor.prepare])
def test_to_get_ready_for_a_compiler_draws_nothing(prepare: Any) -> None:
    """The program's numbers would be others in the first trace of a process."""
    state = torch.get_rng_state()
    prepare.__wrapped__()
    assert torch.equal(torch.get_rng_state(), state)
