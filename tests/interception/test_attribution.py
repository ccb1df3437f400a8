"""Whose bytes they are: modules, operators, lines and phases; and the fingerprint of the work."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import pytest_torchmem as torchmem
from pytest_torchmem import trace
from pytest_torchmem.profile.timeline import Kind, Phase
from tests.modules import Parts
from tests.results import through_a_file
from tests.tracing.programs import several_optimizer_steps

STATE = Kind.OPTIMIZER_STATE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 512)
        self.narrow = nn.Linear(512, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x)
        hidden = hidden.exp()  # the line
        return self.narrow(hidden)


def test_module_operator_and_line() -> None:
    profile = trace(nn.Sequential(Block(), Block()), torch.randn(64, 32))
    found = [one for one in profile.live_at_peak("forward") if one.origin.operator == "aten::exp"]
    assert [allocation.origin.module for allocation in found] == ["Sequential.0", "Sequential.1"]
    assert {allocation.kind for allocation in found} == {Kind.ACTIVATION}
    line = Block.forward.__code__.co_firstlineno + 2
    assert {one.origin.line.rpartition("/")[2] for one in found} == {f"test_attribution.py:{line}"}


def test_the_state_of_a_given_optimizer_belongs_to_the_line_that_gave_it() -> None:
    profile = trace(nn.Linear(64, 64), torch.zeros(2, 64), optimizer=torch.optim.Adam)
    line = sys._getframe().f_lineno - 1
    lines = {one.origin.line for one in profile.live_at_peak("optimizer") if one.kind is STATE}
    assert {line.rpartition("/")[2] for line in lines} == {f"test_attribution.py:{line}"}


def test_backward_belongs_to_the_forward_that_made_it() -> None:
    made = trace(nn.Sequential(Block(), Block()), torch.randn(64, 32)).timeline.allocations
    of_mm = [one for one in made if one.origin.operator == "aten::mm"]
    gradients = {(one.origin.module, one.shape) for one in of_mm if one.kind is Kind.GRADIENT}
    assert ("Sequential.1.narrow", (32, 512)) in gradients
    assert ("Sequential.0.wide", (512, 32)) in gradients
    origins = {(one.origin.phase, one.origin.module, one.origin.operator) for one in made}
    assert (Phase.BACKWARD, "Sequential.0", "aten::mul.Tensor") in origins


def test_what_a_hook_calls_in_the_backward_belongs_to_its_own_line() -> None:
    layer = nn.Linear(32, 16)
    layer.weight.register_hook(lambda made: made.exp())
    line = sys._getframe().f_lineno - 1
    timeline = trace(layer, torch.zeros(4, 32)).timeline
    made = {one.origin.line for one in timeline.allocations if one.origin.operator == "aten::exp"}
    assert {one.rpartition("/")[2] for one in made} == {f"test_attribution.py:{line}"}


class Rows(Parts):
    """Takes a part of what a layer makes, which only the backward makes large again."""

    def forward(self, x: Tensor, first: bool) -> Tensor:
        if first:
            x = self.wide(x)[:8]  # the line of the view before a layer
            return self.narrow(x)
        return self.wide(x)[:8]  # the line of the view that ends a module


@pytest.mark.parametrize("first", [True, False])
def test_the_backward_of_a_view_belongs_to_the_module_that_made_it(first: bool) -> None:
    def program() -> None:
        rows = Rows(wide=nn.Linear(32, 512), narrow=nn.Linear(512, 32))
        made = nn.Sequential()(rows(torch.zeros(64, 32), first))

        made.sum().backward()

    origins = {one.origin for one in trace(program).timeline.allocations}
    line = Rows.forward.__code__.co_firstlineno + (2 if first else 4)
    (made,) = (one for one in origins if one.operator == "aten::slice_backward")
    assert made.module == "Rows"
    # Before a layer, it is the line that calls the layer: views are not seen.
    assert made.line.endswith(f"test_attribution.py:{line + first}")


def test_parameters_and_inputs_have_their_names() -> None:
    made = trace(Block(), torch.randn(64, 32)).timeline.allocations
    labels = {one.label: one.kind for one in made if one.origin.phase is Phase.BASELINE}
    assert labels["wide.weight"] is Kind.PARAMETER
    assert labels["input 0"] is Kind.INPUT


def test_phases_are_found() -> None:
    phases = [phase for _, phase in trace(several_optimizer_steps).timeline.phases]
    once = [Phase.BASELINE, Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN, Phase.OPTIMIZER]
    assert phases[: len(once)] == once
    assert phases.count(Phase.OPTIMIZER) == 2
    assert phases.count(Phase.FORWARD) == 2


def test_totals_add_up_to_the_peak() -> None:
    profile = trace(Block(), torch.randn(64, 32), optimizer=torch.optim.AdamW)
    for phase in ("forward", "backward", "optimizer", None):
        peak = getattr(profile, f"{phase}_peak" if phase else "peak")
        for totals in (profile.by_module, profile.by_operator, profile.by_line, profile.by_kind):
            assert sum(totals(phase).values()) == peak


def test_table_names_the_largest() -> None:
    text = trace(Block(), torch.randn(64, 32), device="cuda").table()
    assert "cuda (a100-80gb)" in text
    assert "backward peak" in text
    assert "wide.weight float32[512, 32]" in text


def test_a_step_that_forgets_the_gpu_is_told() -> None:
    profile = trace(lambda x: x.relu(), torch.randn(4), device="cuda")
    assert profile.peak == 0
    (told,) = profile.warnings
    assert told.startswith("nothing was allocated on cuda")
    assert profile.table().endswith(told)
    assert not trace(lambda: torch.ones(4, device="cuda:1"), device="cuda", gpus=2).warnings


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    model(torch.randn(4, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("sharded", [False, True])
def test_loaded_state_of_an_optimizer_is_its_state(device: str, sharded: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model: nn.Module = nn.Linear(64, 64, bias=False, device=device)
        model = fully_shard(model) if sharded else model
        return model, torch.optim.AdamW(model.parameters())

    def step() -> None:
        if sharded:
            torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        model, optimizer = build()
        train(model, optimizer, device)
        resumed, other = build()
        if sharded:
            state = state_dict.get_optimizer_state_dict(model, optimizer)
            loaded = through_a_file(state, map_location=device)
            state_dict.set_optimizer_state_dict(resumed, other, loaded)
        else:
            other.load_state_dict(through_a_file(optimizer.state_dict(), map_location=device))
        del model, optimizer
        train(resumed, other, device)
        torch.empty(1_000_000, device=device)

    profile = torchmem.trace(step, device=device, world_size=2 if sharded else None)
    assert profile.by_kind()["optimizer state"] >= 2 * 4 * 64 * 64 // (2 if sharded else 1)


class Net(nn.Module):
    def __init__(self, width: int = 16, copies: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, 2)])
        self.register_buffer("scale", torch.ones(8))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x * self.scale)
        for _ in range(self.copies):
            hidden = hidden.exp()
        return self.layers[1](hidden)


def built(width: int = 16, batch: int = 4, copies: int = 1) -> Callable[[], None]:
    def program() -> None:
        Net(width, copies)(torch.randn(batch, 8)).sum().backward()

    return program


def fingerprint(program: Any, device: str = "cpu") -> str:
    return trace(program, device=device).workload


def test_the_same_work_has_the_same_fingerprint() -> None:
    model = Net()

    def several_steps() -> None:
        net = Net()
        for _ in range(3):
            net(torch.zeros(4, 8)).sum().backward()

    def on_cuda() -> None:
        Net().cuda()(torch.randn(4, 8).cuda()).sum().backward()

    def recomputed() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(Net(), x, use_reentrant=False).sum().backward()

    same = fingerprint(built())
    assert same
    assert fingerprint(built(copies=5)) == same, "more memory for the same work"
    assert fingerprint(several_steps) == same
    assert fingerprint(on_cuda, "cuda") == same
    assert fingerprint(recomputed) == same
    assert fingerprint(lambda: model(torch.randn(4, 8)).sum().backward()) == same


@pytest.mark.parametrize("other", [built(width=17), built(batch=5)])
def test_other_work_has_another_fingerprint(other: Callable[[], None]) -> None:
    assert fingerprint(other) != fingerprint(built())


def test_programs_without_modules() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def functional(x: Tensor) -> None:
        (x @ weight).sum().backward()

    def made(batch: int) -> Callable[[], None]:
        return lambda: torch.randn(batch, 8, requires_grad=True).exp().sum().backward()

    first = trace(functional, torch.randn(4, 8)).workload
    assert first == trace(functional, torch.zeros(4, 8)).workload
    assert first != trace(functional, torch.zeros(5, 8)).workload
    assert fingerprint(made(3)) == fingerprint(made(3)) != fingerprint(made(4))
    assert fingerprint(lambda: None) == ""


@pytest.mark.parametrize("where", ["target", "built", "brought"])
def test_parameters_and_buffers_belong_to_their_module(where: str, device: str) -> None:
    model = Net()

    def program() -> None:
        net = (model if where == "brought" else Net()).to(device)
        net(torch.randn(4, 8, device=device)).sum().backward()

    target = (model, torch.randn(4, 8)) if where == "target" else (program,)
    alive = trace(*target, device=device).live_at_peak()
    found = {(one.kind, one.label, one.origin.module) for one in alive}
    assert (Kind.PARAMETER, "layers.0.weight", "Net.layers.0") in found
    assert (Kind.PARAMETER, "layers.1.bias", "Net.layers.1") in found
    assert (Kind.BUFFER, "scale", "Net") in found


def test_a_model_that_is_dropped_is_not_kept_alive() -> None:
    def program() -> None:
        Net(1000)(torch.randn(4, 8)).sum().backward()
        torch.randn(3)

    assert trace(program).end == 0


class WithoutOptions(torch.nn.Linear):
    """As the losses of torchrl do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


class InGroups(nn.Linear):
    """A layer whose parameters are asked for by group."""

    def parameters(self, group: str) -> Any:  # type: ignore[override]
        return [one for name, one in self.named_parameters() if name.startswith(group)]


@pytest.mark.parametrize("kind", [WithoutOptions, InGroups])
def test_a_module_that_lists_its_parameters_by_itself(kind: type[nn.Linear]) -> None:
    assert trace(lambda: kind(2, 2)(torch.ones(1, 2)).sum().backward()).peak
