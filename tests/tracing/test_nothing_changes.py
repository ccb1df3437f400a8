"""A trace leaves the user's model, the generators and torch as they were."""

import copy
import gc
import random
from collections.abc import Callable
from contextlib import suppress
from operator import ne
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, enter_dual_level, make_dual
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import prune
from torch.optim import optimizer as optimizers
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchmem import measure, trace
from pytest_torchmem.torch_private.settings import all_settings, answers
from tests.fake_cuda.test_fake_tensors import PassesOn
from tests.modules import Parts
from tests.processes import run_program
from tests.results import in_a_trace
from tests.tracing.programs import MODELS, hooked


class Raises(Parts):
    def forward(self, x: Tensor) -> Tensor:
        self.linear(x).sum().backward()
        raise self.error


@pytest.mark.parametrize("name", MODELS)
def test_model_is_as_it_was(name: str, device: str) -> None:
    build, make_input = MODELS[name]
    model, x = build(), make_input()
    model.train()
    model(x).sum().backward()  # gradients that a trace may not touch
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    gradients = {name: tensor.grad for name, tensor in tensors.items()}
    kept = {name: one.clone() for name, one in gradients.items() if one is not None}
    x_value, x_gradient = x.detach().clone(), x.grad
    state, python_state = torch.get_rng_state(), random.getstate()
    trace(model, x, device=device, optimizer=torch.optim.SGD)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(tensors)
    for name, tensor in after.items():
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name])
        assert tensor.grad is gradients[name]
        assert tensor.grad is None or torch.equal(tensor.grad, kept[name])
    assert model.training
    assert torch.equal(x.detach(), x_value)
    assert x.grad is x_gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_model_is_as_it_was_after_an_exception(device: str, error: BaseException) -> None:
    collects = gc.isenabled()
    model = Raises(linear=nn.Linear(8, 8), error=error)
    weight = model.linear.weight.detach().clone()
    with pytest.raises(type(error)) as raised:
        trace(model, torch.randn(2, 8), device=device)
    assert raised.value is error or str(raised.value) == str(error)
    assert gc.isenabled() == collects
    assert model.linear.weight.grad is None
    assert torch.equal(model.linear.weight, weight)
    assert torch.ones(3).sum().item() == 3


def test_captured_model_gets_its_tensors_back(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    weight, mean = model[0].weight.detach().clone(), model[1].running_mean.clone()

    def program() -> None:
        moved = model.to(device).half().float()
        moved(torch.randn(4, 8, device=device)).sum().backward()

    trace(program, device=device)
    assert torch.equal(model[0].weight, weight)
    assert torch.equal(model[1].running_mean, mean)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model(torch.randn(4, 8)).sum().isfinite()


def test_what_is_frozen_or_gets_a_history_is_as_it_was(device: str) -> None:
    layer, constant, whole = nn.Linear(4, 4), torch.zeros(4), torch.zeros(2, 4)
    row, average = whole[0], [torch.zeros(4)]

    def body() -> None:
        torch._foreach_lerp_(average, [layer.bias], 0.5)
        row.add_(layer.bias)
        constant.requires_grad_()
        layer.requires_grad_(False)

    trace(body, device=device)
    for tensor in (constant, whole, row, *average):
        assert tensor.grad_fn is None
        assert not tensor.requires_grad
        assert tensor._version == 0
    assert all(parameter.requires_grad for parameter in layer.parameters())


def test_parameters_that_grow_are_as_they_were(device: str) -> None:
    """Each is used before another takes its place, as where a model is widened."""
    splats = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("colour", "place")})

    def grow(models: list[nn.ParameterDict]) -> None:
        for name, old in [*models[0].items()]:
            models[0][name] = nn.Parameter(torch.cat([old.data, old.data]))

    trace(grow, [splats], device=device)
    found = {name: one.tolist() for name, one in splats.named_parameters()}
    assert found == {"colour": [1.0] * 3, "place": [1.0] * 3}


def _follow(models: list[nn.Sequential]) -> None:
    """A momentum encoder, then a swap of weights and back, and a conversion."""
    first, second = models
    for leads, follows in zip(first.parameters(), second.parameters(), strict=True):
        follows.data = follows.data * 0.9 + leads.data * 0.1
    backup = [parameter.data for parameter in first.parameters()]
    for parameter, other in zip(first.parameters(), second.parameters(), strict=True):
        parameter.data = other.data.clone()
    for parameter, data in zip(first.parameters(), backup, strict=True):
        parameter.data = data
    second.bfloat16()


def test_data_that_a_function_gives_to_parameters_is_its_own(device: str) -> None:
    models = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(4096)) for _ in range(2)]
    before = [{name: one.clone() for name, one in model.state_dict().items()} for model in models]
    profile = trace(_follow, models, device=device)
    for model, state in zip(models, before, strict=True):
        for name, one in model.state_dict().items():
            assert one.dtype is state[name].dtype
            assert torch.equal(one, state[name])
    if device == "cpu":
        measured = measure(_follow, models)
        unused = 2 * 8 + 2 * 4096 * 4  # buffers of the first, and counts
        assert profile.peak == measured.peak - unused


def _described(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all that a program could have changed of them, as far as it can be compared."""

    def shown(one: Any) -> Any:
        if isinstance(one, Tensor):
            hooks = len(one._backward_hooks or ()), len(one._post_accumulate_grad_hooks or ())  # type: ignore[attr-defined]
            gradient = None if one.grad is None else shown(one.grad)
            return type(one), one.dtype, one.tolist(), one._version, vars(one), hooks, gradient
        if isinstance(one, dict):
            return [*map(shown, one), *map(shown, one.values())]
        if isinstance(one, (list, set)):
            return [*map(shown, one)]
        return type(one) if isinstance(one, nn.Module) else one

    found = {name: (type(one), shown(vars(one))) for name, one in model.named_modules()}
    return found | {"optimizer": (type(optimizer), shown(vars(optimizer)))}


class _Other(nn.Linear):
    pass


def _swapped(model: nn.Module, _: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.zero_grad()
    model.half()


_Change = Callable[[Any, Any], object]
_CHANGES: dict[str, _Change] = {
    "parameters": lambda model, _: model[0]._parameters.update(weight=nn.Parameter(torch.ones(3))),
    "buffers": lambda model, _: model[1]._buffers.update(running_mean=torch.ones(4)),
    "children": lambda model, _: model._modules.update({"0": nn.ReLU()}),
    "deleted": lambda model, _: (model.__delattr__("0"), model.__delattr__("mask")),
    "none": lambda model, _: (setattr(model[0], "bias", None), setattr(model, "mask", None)),
    "registered": lambda model, _: (
        model.register_parameter("more", nn.Parameter(torch.ones(1))),
        model.register_buffer("mask", torch.zeros(1), persistent=False),
    ),
    "sequential": lambda model, _: (model.pop(0), model.extend([nn.ReLU(), nn.ReLU()])),
    "inserted": lambda model, _: model.insert(0, nn.Linear(4, 4)),
    "weight_norm": lambda model, _: nn.utils.parametrizations.weight_norm(model[0]),
    "hooked weight_norm": lambda model, _: nn.utils.weight_norm(model[0]),
    "pruned": lambda model, _: prune.l1_unstructured(model[0], "weight", 0.5),
    "class": lambda model, _: setattr(model[0], "__class__", _Other),
    "forward": lambda model, _: setattr(model[0], "forward", nn.Identity()),
    "modes": lambda model, _: (model.eval(), model.requires_grad_(False), setattr(model, "n", 2)),
    "attributes": lambda model, _: (setattr(model, "rows", model.rows * 2), model.names.append(1)),
    "converted": lambda model, _: (model.half(), model.to("meta")),
    "hooks of parameters": lambda model, _: (
        model[0].weight.register_hook(lambda gradient: 1 / 0),
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: 1 / 0),
    ),
    "hooks of modules": lambda model, _: (
        model[0].register_full_backward_hook(lambda *_: None),
        model[0].register_state_dict_post_hook(lambda *_: None),
        model[0].register_load_state_dict_pre_hook(lambda *_: None),
    ),
    "hooks of optimizers": lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None),
    "groups": lambda model, optimizer: setattr(optimizer, "param_groups", [{"params": []}]),
    "unfrozen": lambda model, optimizer: (
        optimizer.add_param_group({"params": [torch.ones(2)], "lr": 0.1}),
        optimizer.param_groups[0]["params"].clear(),
        optimizer.defaults.clear(),
    ),
    "states": lambda model, optimizer: optimizer.state.clear(),
    "loaded": lambda _, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "swapped": lambda m, _: torch.utils.swap_tensors(m[0].bias, nn.Parameter(torch.ones(2))),
    "swapped as they are converted": _swapped,
    "without memory": lambda model, _: model[1].running_mean.untyped_storage().resize_(0),
    "assigned": lambda model, _: model.load_state_dict(
        {name: one * 2 for name, one in model.state_dict().items()}, assign=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_what_a_function_changes_of_a_model_is_as_it_was(change: _Change, device: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(1))
    model.rows, model.names, model.n = torch.ones(2), ["a"], 1
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4)).square().sum().backward()
    optimizer.step()
    before = _described(model, optimizer)

    def function(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        change(model.to(device), optimizer)

    for _ in range(2):
        trace(function, model, optimizer, device=device)
        assert _described(model, optimizer) == before
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()


def test_hooks_run_on_the_module() -> None:
    model = hooked()
    seen: list[nn.Module] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(module))
    trace(model, torch.randn(4, 32))
    assert seen == [model[1]]


def test_hooks_of_parameters_run_on_them() -> None:
    """They may keep gradients, or free them at once."""

    def built() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def keep(gradient: Tensor) -> Tensor:
        kept.append(gradient)
        return gradient * 2

    def free(parameter: Tensor) -> None:
        parameter.grad = None

    x, kept, plain, keeps, frees, steps = torch.randn(8, 256), [], *(built() for _ in range(4))
    for parameter in keeps.parameters():
        parameter.register_hook(keep)
    for parameter in frees.parameters():
        parameter.register_post_accumulate_grad_hook(free)
    optimizers = {one: torch.optim.SGD([one]) for one in steps.parameters()}
    for parameter in steps.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    ends = []
    for model in (keeps, plain, frees):
        profile = trace(model, x, host="here")
        kept.clear()
        assert profile.figures() == measure(model, x).figures()
        kept.clear()
        ends.append(trace(model, x, device="cuda").end)
        kept.clear()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert (ends[0], ends[1]) == (ends[1] + 4 * 257 * 256 * 4, ends[2] + 4 * 257 * 256 * 4)
    weights = [one.detach().clone() for one in steps.parameters()]
    assert trace(steps, x).end == trace(plain, x).end
    assert all(map(torch.equal, steps.parameters(), weights))


def test_shared_storages_stay_shared_on_the_host() -> None:
    class Halves(Parts):
        def forward(self) -> Tensor:
            return self.first * self.second

    first, second = map(nn.Parameter, torch.randn(2, 64))
    model = Halves(first=first, second=second)
    assert trace(model, device="cpu").baseline == 2 * 64 * 4
    # A copy of each part is what moving the module would make.
    assert trace(model, device="cuda").baseline == 2 * 64 * 4


def test_traces_do_not_nest():
    with pytest.raises(ValueError, match="a traced program cannot trace"):
        trace(lambda: trace(nn.Linear(2, 2), torch.randn(1, 2)))


@pytest.mark.parametrize("first", [lambda weight: weight.t(), lambda weight: weight.detach().t()])
def test_a_captured_weight_met_as_something_else_gets_its_gradient_back(device, first):
    """The transpose of a weight is what ``Linear`` hands to the first operator that runs."""
    linear, fresh = nn.Linear(4, 4), nn.Linear(4, 4)
    linear(torch.ones(1, 4)).sum().backward()
    gradient = linear.weight.grad
    for layer in (linear, fresh):

        def step(layer: nn.Linear = layer) -> None:
            (torch.ones(1, 4) @ first(layer.weight)).sum()
            layer(torch.ones(1, 4)).sum().backward()

        trace(step, device=device)
    assert linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))  # type: ignore[arg-type]
    assert fresh.weight.grad is None


def test_parameters_on_meta() -> None:
    model, real, x = nn.Linear(64, 64, device="meta"), nn.Linear(64, 64), torch.randn(2, 64)
    assert trace(model, x).figures() == trace(real, x).figures()
    assert model.weight.is_meta


def test_the_number_of_threads_is_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it, even to what it is, changes how MKL runs from then on (batched lu_factor)."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    trace(nn.Linear(4, 4), torch.ones(2, 4))
    assert numbers == []


@in_a_trace()
def test_the_default_dtype_is_that_of_the_moment(device: str) -> None:
    found: list[torch.dtype] = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        count = torch.arange(3, device=device)
        made = (torch.zeros(5, device=device), torch.tensor([1.0], device=device), count / 2)
        found.extend(tensor.dtype for tensor in (*made, count.sin()))
    assert found == 4 * [torch.float32] + 4 * [torch.float64]


def test_settings_of_the_process_are_put_back() -> None:
    def settings() -> list[object]:
        return [
            *(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            *(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
            *(torch.backends.cudnn.conv.fp32_precision, torch.backends.mkldnn.enabled),
            *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
            *(torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("mps")),
            torch.backends.miopen.immediate,  # type: ignore[attr-defined]
        ]

    def program() -> None:
        torch.set_default_dtype(torch.bfloat16)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.enabled = torch.backends.mkldnn.enabled = False
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)
        torch.set_autocast_enabled("xla", True)
        torch.set_autocast_dtype("mps", torch.bfloat16)
        torch.backends.miopen.immediate = True  # type: ignore[attr-defined]
        inside.extend(settings())

    inside: list[object] = []
    before = settings()
    # torch.testing._internal, which other tests import, lets nobody write to torch.backends.
    with torch.backends.__allow_nonbracketed_mutation():
        trace(program, device="cuda")
    assert settings() == before
    assert not any(one == other for one, other in zip(inside, before, strict=True))


class _Mode(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("raises", [False, True])
def test_what_a_program_enters_and_never_leaves(device: str, raises: bool) -> None:
    """The thread's modes, hooks and dual level are those of before."""
    entered, packed = list[object](), list[object]()

    def program() -> None:
        torch.set_default_device(device)
        hooks = saved_tensors_hooks(packed.append, lambda x: x)
        for context in (torch.inference_mode(), _Mode(), PassesOn(), hooks):
            entered.append(context)
            context.__enter__()
        enter_dual_level()
        if raises:
            raise ZeroDivisionError

    with saved_tensors_hooks(lambda x: x, lambda x: x), _Mode():
        with suppress(ZeroDivisionError):
            trace(program, device=device)
        torch.ones(2, requires_grad=True).exp().sum().backward()
        assert not packed
    assert len(entered) == 4
    assert not torch.is_inference_mode_enabled()
    assert not torch._C._len_torch_function_stack()
    assert not torch._C._len_torch_dispatch_stack()
    with dual_level():
        make_dual(torch.ones(2), torch.ones(2))
    entered.clear()  # with the guard of the program
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(2, requires_grad=True).exp().requires_grad


def other(value: object) -> object:
    """Return another value that a setting may have."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple) and all(isinstance(one, bool) for one in value):
        return tuple(not one for one in value)
    others: dict[object, object] = {torch.float32: torch.float64, "highest": "high"}
    others |= {"none": "ieee", "tf32": "ieee"}
    return others.get(value, value)


def test_all_that_torch_lets_a_program_set_is_put_back(device: str) -> None:
    settings = all_settings()
    before = answers(settings)
    changed = 0

    def program() -> None:
        nonlocal changed
        torch.manual_seed(1)  # for devices that are not used yet, too
        torch.set_float32_matmul_precision("medium")
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        torch.set_printoptions(precision=2)
        torch.set_flush_denormal(True)
        nn.modules.module.register_module_forward_hook(lambda *_: None)
        nn.modules.module.register_module_full_backward_hook(lambda *_: None)
        for setting, value in zip(settings, before, strict=True):
            try:
                setting.set_to(other(value))
            except (RuntimeError, TypeError, ValueError):
                continue  # of this build
        changed = sum(map(ne, answers(settings), before))

    with torch.backends.__allow_nonbracketed_mutation():
        trace(program, device=device)
    assert answers(settings) == before
    assert changed > len(settings) // 2


def test_a_dispatch_mode_is_asked_first(device: str) -> None:
    """On every version of torch: before 2.13 the key of the interception comes before a mode's."""

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            x = torch.ones(4, 8, device=device, requires_grad=True)
            (x @ x.t()).relu().sum().backward()
        return counter.get_total_flops()

    seen: list[int] = []
    traced = trace(lambda: seen.append(flops()), device=device)
    assert seen == [3 * 2 * 4 * 8 * 4]
    assert traced.backward_peak


def test_a_default_device_in_the_first_trace_of_a_process() -> None:
    """Torch remembers which of its functions make tensors when it is first asked."""
    program = """
import torch
from pytest_torchmem import trace

def body():
    with torch.device("meta"):
        torch.tensor([1.0])

trace(body)
with torch.device("meta"):
    assert torch.tensor([1.0]).device.type == "meta"
trace(lambda: torch.tensor([1.0], device="cuda"), device="cuda")
"""
    run_program(program)


def test_a_configuration_is_not_asked_while_the_program_runs() -> None:
    asked: list[str] = []

    class Configuration:
        __module__ = "transformers.configuration_utils"

        def __init__(self) -> None:
            self._output_attentions = True

        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

        def to_diff_dict(self) -> dict[str, Any]:
            return {}

    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.config = Configuration()

    def program() -> None:
        model = Model()
        asked.clear()
        model(torch.ones(2, 4))
        assert not asked

    assert any("output_attentions" in text for text in map(str, trace(program).facts.values()))


def test_hooks_of_registrations_are_gone_through_while_a_trace_begins_and_ends() -> None:
    """As by a thread that registers a parameter at that moment."""
    peaks: list[int] = []

    def hook(module: nn.Module, name: str, parameter: object) -> None:
        if not peaks:
            peaks.append(0)
            peaks[0] = trace(lambda: nn.Linear(2, 2)(torch.ones(1, 2))).peak

    register = register_module_parameter_registration_hook
    with register(hook), register(lambda *_: None):
        nn.Linear(3, 3)
    assert peaks == [4 * (6 + 2 + 2)]


def test_hooks_of_steps_are_gone_through_while_a_trace_begins_and_ends() -> None:
    """As by a thread whose optimizer steps at that moment."""
    peaks: list[int | None] = []

    def step() -> None:
        layer = nn.Linear(2, 2)
        layer(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(layer.parameters()).step()

    def hook(*_: Any) -> None:
        if not peaks:
            peaks.append(None)
            peaks[0] = trace(step).optimizer_peak

    registered = [
        getattr(optimizers, f"register_optimizer_step_{at}_hook") for at in ("pre", "post")
    ]
    handles = [register(one) for register in registered for one in (hook, lambda *_: None)]
    with handles[0], handles[1], handles[2], handles[3]:
        for handle in handles[:2]:
            peaks.clear()
            step()
            assert peaks == [4 * (6 + 6)]
            handle.remove()  # the second time of what is called after a step


def test_a_loss_from_before_a_trace_can_go_backward_after_it(device: str) -> None:
    """Nothing was written to what it has saved, which versions tell."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    optimizer, x = torch.optim.SGD(model.parameters()), torch.ones(3, 4)
    loss, tensors = model(x).sum(), [*model.parameters(), *model.buffers()]
    versions = [one._version for one in tensors]

    def body() -> None:
        model.to(device)(x.to(device)).sum().backward()
        optimizer.step()

    trace(body, device=device)
    trace(model, x, device=device, optimizer=torch.optim.SGD)
    assert [one._version for one in tensors] == versions
    loss.backward()


def trained() -> list[float]:
    layer = nn.Linear(4, 4)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    optimizer, losses = torch.optim.SGD(layer.parameters(), lr=1.0), []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(torch.ones(2, 4)).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "entered",
    [
        lambda device: torch.autocast(device, torch.bfloat16),
        lambda _: torch.no_grad(),
        lambda _: torch.inference_mode(),
        lambda _: torch.set_grad_enabled(False),
        lambda _: torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        lambda _: saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda _: sdpa_kernel(SDPBackend.MATH),
        lambda _: torch.backends.cudnn.flags(deterministic=True),
        lambda _: torch.random.fork_rng(devices=[]),
        lambda _: torch.autograd.set_detect_anomaly(True),
        lambda _: torch.autograd.set_multithreading_enabled(False),
        lambda _: torch.sparse.check_sparse_tensor_invariants(True),
        lambda _: BaseTorchFunctionMode(),
        torch.device,
        lambda _: FlopCounterMode(display=False),
    ],
)
def test_what_suspended_generators_leave_after_the_trace_is_left_once(entered, device):
    suspended: list[Any] = []

    def body() -> None:
        def steps() -> Any:
            with entered(device):
                yield torch.ones(3) + 1

        for _ in range(2):  # the second finds what the first has set
            suspended.append(steps())
            next(suspended[-1])

    def now() -> Any:
        keys = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        return [str(of_thread()) for of_thread in keys], answers(all_settings())

    expected, before = trained(), now()
    trace(body, device=device)
    assert (trained(), now()) == (expected, before)
    for generator in suspended:
        generator.close()
    assert (trained(), now()) == (expected, before)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
