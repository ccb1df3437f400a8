"""After a trace, however it ended, torch is as it was."""

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nvtx
import torch.serialization
import torch.utils._device
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from pytest_torchmem import trace
from pytest_torchmem.journal.in_place import InPlace
from tests.processes import in_thread, run_program
from tests.results import result_of

OWN_KEYS = ("Fake", "AutocastIPU", "AutocastHPU")
"""Keys that nothing but a trace uses, and that its threads alone include."""


def places() -> dict[str, dict[str, Any]]:
    """Return the attributes of every class and module that a trace could replace."""
    names = """
        torch.Tensor torch.nn.Parameter torch.nn.Module torch.optim.Optimizer torch.nn.functional
        torch.UntypedStorage torch._ops.HigherOrderOperator torch.utils._device.DeviceContext
        builtins torch torch._C torch._C._nn torch.cuda torch.cuda.memory torch.cuda.random
        torch.cuda.streams torch.cuda.nvtx torch.backends.cudnn torch.backends.cudnn.rnn signal
        torch.accelerator torch.accelerator.memory torch.serialization torch.random
    """
    return {name: dict(vars(resolve_name(name))) for name in names.split()}


def registrations() -> dict[str, Any]:
    """Return what is registered with the dispatcher: every operator's kernels, every fallback."""
    kernels = hashes(torch._C._dispatch_dump)
    fallbacks = {
        key: torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(key))
        for key in (*OWN_KEYS, "AutocastCUDA", "AutogradCPU", "CPU")
    }
    of_fake = torch._C._dispatch_get_registrations_for_dispatch_key("Fake")
    of_python = set(vars(torch.library)["_impls"])
    return {**kernels, "fallbacks": fallbacks, "of Fake": of_fake, "Python's": of_python}


def hashes(dump: Callable[[str], str]) -> dict[str, int]:
    return {name: hash(dump(name)) for name in torch._C._dispatch_get_all_op_names()}


def hooks() -> dict[str, int]:
    of_all = (vars(modules) | vars(optimizers)).items()
    found = {name: value for name, value in of_all if name.startswith("_global_")}
    return {name: len(value) for name, value in found.items() if isinstance(value, dict)}


def thread_state() -> list[Any]:
    """Return what of the dispatcher, autocast and the generators belongs to this thread."""
    return [
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
        *(torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()),
        *(torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        *(torch._C._is_torch_function_enabled(), torch._C._current_graph_task_id()),
        *(torch.get_rng_state().tolist(), torch.get_num_threads()),
        *(torch.cuda.is_initialized(), torch.cuda.is_available()),
        hooks(),
        torch.ones(2, requires_grad=True).device,
    ]


def state() -> list[Any]:
    """Return all of the above."""
    return [places(), registrations(), thread_state()]


def whole_step(device: str) -> None:
    """Touch every layer of a trace: identity, dispatch, autocast, recurrent layers, optimizer."""
    torch.set_default_device(device)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    layer = nn.LSTM(4, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *layer.parameters()])
    scaler = torch.amp.GradScaler(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(torch.ones(2, 3, 8, 8)).float().sum() + layer(torch.ones(3, 2, 4))[0].sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    torch.ones(2, 3).unfold(1, 2, 1).unbind()  # views that are seldom used
    if device == "cuda":
        torch.cuda.Stream().synchronize()


def end_normally(device: str) -> None:
    """Return."""


def end_with_an_error(device: str) -> None:
    raise ValueError("of the program")


def end_with_an_interrupt(device: str) -> None:
    raise KeyboardInterrupt


def end_inside_of_a_region(device: str) -> None:
    torch.autocast(device).__enter__()
    raise ValueError("of the program")


def end_in_backward(device: str) -> None:
    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    Interrupted.apply(torch.ones(2, requires_grad=True)).sum().backward()


ENDINGS = [end_normally, end_with_an_error, end_with_an_interrupt]
ENDINGS += [end_inside_of_a_region, end_in_backward]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("apart", [False, True], ids=["here", "in a thread"])
def test_torch_is_as_it_was(device: str, ending: Callable[[str], None], apart: bool) -> None:
    trace(lambda: whole_step(device), device=device)  # what is imported and learned once
    torch.ones(1).device  # noqa: B018
    before = state()
    within: list[Any] = []

    def program() -> None:
        whole_step(device)
        within.append(registrations())
        ending(device)

    def run() -> None:
        here = thread_state()
        try:
            trace(program, device=device)
            ended.append(False)
        except (ValueError, KeyboardInterrupt):
            ended.append(True)
        assert thread_state() == here

    ended: list[bool] = []
    in_thread(run) if apart else run()
    after = state()
    assert ended == [ending is not end_normally]
    assert within[0] == before[1]  # what was registered once is left alone
    wanted = OWN_KEYS if device == "cuda" else ("Fake",)  # the others are of fake cuda alone
    assert all(within[0]["fallbacks"][key] for key in wanted)
    for name, attributes in before[0].items():
        now, none = after[0][name], "absent"
        keys = attributes.keys() | now.keys()
        changed = {key for key in keys if attributes.get(key, none) is not now.get(key, none)}
        assert changed <= {"__warningregistry__", "__annotations__", "_dynamo", "compiler"}, name
    assert after[1].items() ^ before[1].items() == set()
    assert after[2] == before[2]


def test_dispatch_tables_are_written_once(device: str) -> None:
    trace(lambda: whole_step(device), device=device)
    before = hashes(torch._C._dispatch_dump_table)

    def program() -> dict[str, int]:
        whole_step(device)
        return hashes(torch._C._dispatch_dump_table)

    assert result_of(program, device=device) == before
    assert hashes(torch._C._dispatch_dump_table) == before


_FIRST_OF_A_PROCESS = """
import contextlib
import torch
from torch import nn
_C = torch._C

def keys():
    return *map(str, (_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set())),

def rows():
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        for line in torch._C._dispatch_dump_table(name).splitlines():
            key, _, kernel = line.partition(": ")
            if key not in ("Fake", "AutocastIPU", "AutocastHPU"):
                found[name, key] = kernel
    return found

before, table = keys(), rows()
import pytest_torchmem as torchmem
for device in ("cpu", "cuda"):
    torchmem.trace(nn.Linear(4, 4), torch.ones(2, 4), device=device)
    with contextlib.suppress(ZeroDivisionError):
        torchmem.trace(lambda: 1 / 0, device=device)
assert keys() == before
after = rows()
assert {row for row in table if table[row] != after[row]} == set()
"""


def test_nobody_notices_the_first_trace_of_a_process() -> None:
    """What it registers stands for keys that nobody else includes; the process ends in peace."""
    assert run_program(_FIRST_OF_A_PROCESS).stderr == ""


_ITS_OWN_PROFILER = """
import torch
from torch import nn
import pytest_torchmem as torchmem
from pytest_torchmem.errors import UsageError

class Model(nn.Module):
    def forward(self, x, module=None):
        return x + module

def program(device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        x = torch.ones(1000, device=device)
        Model()(x, module=x)

assert torchmem.trace(lambda: program("cpu"), device="cpu").peak == 8000
assert torchmem.trace(lambda: program("cuda"), device="cuda").peak == 8000
try:
    torchmem.measure(lambda: program("cpu"), device="cpu")
except UsageError as error:
    assert "runs torch.profiler itself" in str(error), error
else:
    raise AssertionError("a recording that was ended gave figures")
"""


def test_a_program_may_run_the_profiler_with_stacks() -> None:
    """The tracer of Python frames takes each module's from the frame of its call."""
    run_program(_ITS_OWN_PROFILER)


_COMPILER_OF_A_PROCESS = """
import sys
import torch
import pytest_torchmem as torchmem
from pytest_torchmem.torch_private.function_holders import is_left_over

def first_use(way):
    x = torch.ones(2, 2, device="cuda")
    if way == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx
        make_fx(torch.sin)(x)
    elif way == "linearize":
        torch.func.linearize(torch.sin, x)
    else:
        torch.compile(torch.sin, backend="eager")(x)

torchmem.trace(lambda: first_use(sys.argv[1]), device="cuda", mode="aot")

from torch._dynamo import trace_rules
from torch._dynamo.variables import torch as variables
from torch._inductor.lowering import lowerings

assert torch.tensor in lowerings and torch.full in lowerings
assert torch.cuda.is_available in variables.constant_fold_functions
known = trace_rules.get_torch_obj_rule_map()
assert torch.cuda.is_available in known and torch.compile in known
for table in (lowerings, known, variables.constant_fold_functions):
    assert not [*filter(is_left_over, table)]
"""


def test_the_compiler_lists_functions_of_torch_alone(chance: random.Random) -> None:
    """A process first uses Dynamo and Inductor in a trace; they keep what they list."""
    way = chance.choice(["make_fx", "linearize", "compile"])
    assert run_program(_COMPILER_OF_A_PROCESS, way).stderr == ""


def test_other_threads_see_torch_as_it_is() -> None:
    seen: list[Any] = []
    go = threading.Event()

    def other() -> None:
        go.wait(60)
        x = torch.ones(2, 2, requires_grad=True)
        output = nn.functional.dropout(nn.functional.softmax(x, -1), 0.5)
        output.sum().backward()
        seen.extend([x.device.type, torch.cuda.is_available(), output.data_ptr() != 0])
        seen.append(x.grad is not None and bool(x.grad.isfinite().all()))
        x = torch.arange(4.0, requires_grad=True)
        nn.functional.dropout(x, 0.0).sum().backward()
        seen.append(x.grad.sum().item())

    def program() -> torch.Tensor:
        go.set()
        thread.join()
        return torch.ones(3) + 1

    thread = threading.Thread(target=other)
    thread.start()
    available = torch.cuda.is_available()
    trace(program, device="cuda")
    assert seen == ["cpu", available, True, True, 4.0]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise, whatever the process that runs the tests does of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_until_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.set_rng_state

    def interrupted(state: torch.Tensor) -> None:
        """Put the first of the generators back, while Ctrl-C is pressed."""
        signal.raise_signal(signal.SIGINT)
        original(state)

    random.seed(7)
    before, handler = random.getstate(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(torch, "set_rng_state", interrupted)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # others have generators kept
    with pytest.raises(KeyboardInterrupt):
        trace(lambda: random.random(), device="cuda")
    assert random.getstate() == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_a_handler_raises_reaches_the_program(device: str) -> None:
    """A time limit ends what it limits, whatever the profiler is at when the signal arrives."""
    finished: list[int] = []

    def expire(*_: object) -> None:
        raise TimeoutError

    def program() -> None:
        signal.signal(signal.SIGALRM, expire)
        x = torch.ones(8, 8, device=device)
        for number in range(40):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            with suppress(TimeoutError):
                for _ in range(1000):
                    x = x.clamp(0, 1) + x
                finished.append(number)

    before = signal.getsignal(signal.SIGALRM)
    profile = trace(program, device=device)
    assert signal.signal(signal.SIGALRM, before) is expire
    assert not finished
    assert 4096 > profile.peak > profile.end == 0


def test_an_interrupt_while_tensors_are_laid_leaves_them_as_they_were() -> None:
    """The signal arrives between any two of the instructions that lay them, or give them back."""
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    before = [(one, one.detach().clone(), one.grad) for one in model.parameters()]
    methods = InPlace.lay, InPlace._lay, InPlace.restore, InPlace._lift
    codes = {method.__code__ for method in methods}
    for number in range(60):
        seen = 0

        def interrupt(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            if frame.f_code not in codes:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == 9 * number:  # noqa: B023
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)
            return interrupt

        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt):
            trace(model, torch.ones(2, 4))
        sys.settrace(None)
        assert list(model.parameters()) == [one for one, _, _ in before]
        for one, value, gradient in before:
            assert torch.equal(one, value), number
            assert one.grad is gradient


def test_a_trace_is_freed_without_the_garbage_collector(device: str) -> None:
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    trace(model, batch, device=device)
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        trace(model, batch, device=device)
        gc.collect()
        kinds = {f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage}
        assert not [kind for kind in kinds if kind.startswith("pytest_torchmem")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_nothing_of_a_module_s_trace_is_looked_for_among_all_objects(device, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    trace(model, torch.ones(2, 4), device=device)

    def get_objects(*_: int) -> list[Any]:
        raise AssertionError("something that the trace has made outlives it")

    monkeypatch.setattr(gc, "get_objects", get_objects)
    trace(model, torch.ones(2, 4), device=device)


def test_tensors_of_the_caller_lie_as_they_did(device: str) -> None:
    grown, turned, out = torch.ones(2, 3), torch.arange(6.0).view(2, 3), torch.empty(0)

    def program() -> None:
        grown.resize_(4, 8)
        turned.t_().unsqueeze_(0)
        torch.add(turned, turned, out=out)

    before = [trace(program, device=device).figures() for _ in range(2)]
    assert before[0] == before[1]
    assert torch.equal(grown, torch.ones(2, 3))
    assert torch.equal(turned, torch.arange(6.0).view(2, 3))
    assert turned.stride() == (3, 1)
    assert (out.shape, out.untyped_storage().nbytes()) == ((0,), 0)
