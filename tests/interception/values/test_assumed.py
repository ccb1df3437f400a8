"""What a trace takes for true of values that it does not know, and what a budget counts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.values import contents
from pytest_torchmem.operators.spec import spec_of
from tests.modules import Parts
from tests.results import in_a_trace
from tests.tracing.programs import differences


def activations() -> Tensor:
    """Unknown values, too many to be kept."""
    return torch.randn(100, 100) @ torch.randn(100, 100)


def answers(*questions: Callable[[Tensor], object]) -> tuple[list[bool], tuple[str, ...]]:
    found: list[bool] = []

    def program() -> None:
        x = activations()
        found.extend(bool(question(x)) for question in questions)

    return found, trace(program, values="none").warnings


def test_what_is_settled_is_no_guess() -> None:
    """Values are finite; a tensor equals itself, and none of another shape."""
    found, warnings = answers(
        lambda x: torch.isfinite(x.sum()),
        lambda x: torch.isfinite(x).all(),
        lambda x: torch.isnan(x).any(),
        lambda x: torch.isinf(x).any() | torch.isnan(x).any(),
        lambda x: ~torch.isnan(x).any(),
        lambda x: (x == math.inf).any(),
        lambda x: (x.abs() < math.inf).all(),
        lambda x: (x != x).any(),
        lambda x: torch.isnan(x)[3:, 4].any(dim=0),
        lambda x: torch.logical_and(torch.isfinite(x).all(), torch.isnan(x).any()),
        lambda x: torch.equal(x, x),
        lambda x: torch.equal(x, x.view(-1)),
        lambda x: torch.equal(x[1:], x[1:]),
        lambda x: (x.mean() > 3.0) & torch.isnan(x).any(),
        lambda x: (x.mean() < 3.0) | torch.isfinite(x).all(),
    )
    assert found[:7] == [True, True, False, False, True, False, True]
    assert found[7:] == [False, False, False, True, False, True, False, True]
    assert warnings == ()
    with pytest.raises(UnknownValueError):
        answers(lambda x: torch.equal(x, x + 0.0))


def test_a_single_number_counts_as_one_and_the_profile_says_so() -> None:
    found, warnings = answers(
        lambda x: x.mean() > 3.0,
        lambda x: x.mean() > 1e-3,
        lambda x: x.mean() == x.std(),
        lambda x: x.any(),
        lambda x: (x.mean() > 3.0) & torch.isfinite(x.mean()),
    )
    assert found == [False, True, True, True, False]
    assert len(warnings) == 2  # of one line, with both answers
    told = "comparison with an unknown value; unknown values are treated as 1"
    assert all("test_assumed.py:" in warning and told in warning for warning in warnings)


def test_every_element_counts_as_one_and_integers_equal_no_others() -> None:
    labels = torch.tensor([3, 1])
    questions: list[tuple[Callable[[Tensor], object], bool]] = [
        (lambda x: (x > 0).any(), True),
        (lambda x: (x.sum(dim=0) > 5.0).all(), False),
        (lambda x: ((x >= 0) * (x <= 1)).all(), True),
        (lambda x: torch.isnan(x).index_fill_(0, torch.tensor(0), True).any(), True),
        (lambda x: (x.argmax(1)[:2] == labels).all(), False),
        (lambda x: torch.isin(x.argmax(1), labels).any(), False),
        (lambda x: (torch.isin(x.argmax(1), labels) | torch.tensor([True])).all(), True),
        (lambda x: (torch.tensor([1]) & ~torch.isin(x.argmax(1), labels)).max() == 0, False),
        (lambda x: torch._is_any_true(torch.isnan(x)), False),
    ]
    assert len(answers(*[question for question, _ in questions])[1]) == 2
    for question, expected in questions:
        assert answers(question)[0] == [expected]


def test_a_loop_that_waits_for_another_answer_ends() -> None:
    def program() -> None:
        x = activations()
        while (x > 0).any():
            x = x - 1.0

    message = r"test_assumed\.py:\d+: .*was read 1,000 times here"
    with pytest.raises(UnknownValueError, match=message):
        trace(program, values="none")


def test_distributions_take_their_arguments_for_valid() -> None:
    def program() -> None:
        x = activations()
        torch.distributions.Categorical(probs=x.softmax(-1)).sample()
        torch.distributions.Normal(x, x.exp()).rsample()
        torch.distributions.MultivariateNormal(x[:, 0], torch.eye(x.shape[0])).log_prob(x[:, 1])

    assert trace(program).warnings == ()


def test_a_mask_that_is_assumed_decides_no_shape() -> None:
    (warning,) = trace(lambda: activations()[torch.isnan(activations())], values="none").warnings
    assert "every element counts as kept" in warning


@given(st.lists(st.sampled_from(["and", "or", "not"]), max_size=6), st.booleans())
@in_a_trace()
def test_assumptions_are_put_together_as_values_are(steps: list[str], first: bool) -> None:
    x = activations()
    value, real = (torch.isfinite(x).all() if first else torch.isnan(x).any()), first
    for step in steps:
        other, told = torch.isinf(x).any(), False
        if step == "not":
            value, real = ~value, not real
        elif step == "and":
            value, real = value & ~other, real and not told
        else:
            value, real = value | other, real or told
    assert bool(value) == real


def test_gradients_are_clipped_where_they_have_to_be_finite(device: str) -> None:
    def program() -> None:
        model = nn.Linear(100, 100, device=device)
        model(torch.randn(8, 100, device=device)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    assert trace(program, device=device).warnings == ()


def test_an_optimizer_that_takes_the_larger_of_two_numbers() -> None:
    class Scaled(torch.optim.SGD):
        """Scales its steps by the parameters, as Adafactor does."""

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    scale = max(1e-3, parameter.norm(2) / parameter.numel() ** 0.5)
                    parameter.sub_(parameter.grad * (scale * group["lr"]))

    model, x = nn.Linear(200, 200), torch.randn(8, 200)
    profile = trace(model, x, optimizer=Scaled, host="here", values="none")
    assert profile.figures() == measure(model, x, optimizer=Scaled).figures()
    assert len(profile.warnings) == 1


aten = torch.ops.aten
DISTINCT = torch.arange(24.0).reshape(4, 6)
KEEP_ALL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "nonzero": (aten.nonzero.default, (DISTINCT + 1,)),
    "nonzero of a number": (aten.nonzero.default, (torch.tensor(2.0),)),
    "masked_select": (aten.masked_select.default, (DISTINCT, torch.ones(6, dtype=torch.bool))),
    "_unique": (aten._unique.default, (DISTINCT, True, True)),
    "_unique2": (aten._unique2.default, (DISTINCT, True, True, True)),
    "_unique2 of truths": (aten._unique2.default, (torch.tensor([True, False, True]),)),
    "unique_consecutive": (aten.unique_consecutive.default, (DISTINCT, True, True)),
    "unique_consecutive, rows": (aten.unique_consecutive.default, (DISTINCT, False, False, 0)),
    "unique_dim": (aten.unique_dim.default, (DISTINCT, 1)),
    "bincount": (aten.bincount.default, (torch.tensor([255, 3]).byte(),)),
    "weights": (aten.bincount.default, (torch.tensor([127]).char(), torch.tensor([1.0]))),
    "unique_dim_consecutive": (aten.unique_dim_consecutive.default, (DISTINCT, 0)),
}


@pytest.mark.parametrize(("overload", "args"), KEEP_ALL.values(), ids=list(KEEP_ALL))
def test_the_largest_outputs_are_those_of_kernels_that_keep_all(overload, args):
    at_most = spec_of(overload).cpu.at_most
    assert at_most is not None
    on_meta = tuple(one.to("meta") if isinstance(one, Tensor) else one for one in args)
    kept, largest = overload(*args), at_most(on_meta, {})
    if isinstance(kept, Tensor):
        kept, largest = (kept,), (largest,)
    for real, output in zip(kept, largest, strict=True):
        assert (real.shape, real.dtype) == (output.shape, output.dtype)


def selected(x: Tensor) -> Tensor:
    score = (x @ x.new_ones(64, 64)).sum(1)
    return x[score > 0] * 2


def found(x: Tensor) -> Tensor:
    rows, columns = torch.where((x @ x.new_ones(64, 64)) > 0)
    return x[rows, columns].exp()


def distinct(x: Tensor) -> Tensor:
    values, places, counts = (x * 3).round().unique(return_inverse=True, return_counts=True)
    return values[places] * counts.sum()


@pytest.mark.parametrize("program", [selected, found, distinct], ids=lambda one: one.__name__)
def test_figures_are_at_most_those(program: Callable[[Tensor], Tensor], device: str) -> None:
    def step() -> Tensor:
        return program(torch.randn(5000, 64, device=device)).sum()

    guessed, real = (trace(step, device=device, values=values) for values in ("none", "real"))
    assert guessed.peak >= real.peak
    (*_, warning) = guessed.warnings
    assert "test_assumed.py:" in warning
    assert "every element counts as kept, so the memory is at most what is reported" in warning
    assert real.warnings == ()


def test_what_is_written_through_a_mask_says_how_many_rows_it_has() -> None:
    def step() -> None:
        x, mask = torch.randn(4000, 64), torch.randn(4000, 64).sum(1) > 0
        y = torch.zeros_like(x)
        y[mask] = torch.ones(17, 64)
        y[:, torch.randn(64, 9000).sum(1) > 0] = torch.ones(4000, 3)

    assert "at most" in " ".join(trace(step, values="none").warnings)


def test_models_without_memory_have_bounds() -> None:
    class Routed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.gate(x).argmax(1) == 2
            x[rows] = self.expert(x[rows])
            return x

    with torch.device("meta"):
        model = Routed(gate=nn.Linear(64, 4), expert=nn.Linear(64, 64))
    profile = trace(model, torch.randn(128, 64))
    assert profile.values == "guessed"
    assert "every element counts as kept" in profile.warnings[0]
    with pytest.raises(UnknownValueError, match="indexed with a mask of unknown values"):
        trace(model, torch.randn(128, 64), values="real")


def test_an_argument_may_say_the_size(device: str) -> None:
    def step(size: int | None) -> None:
        counts = (torch.randn(4000, 64, device=device).sum(1) > 0).long()
        rows = torch.ones(4000, 3, device=device)
        assert rows.repeat_interleave(counts, 0, output_size=size).shape == (size, 3)

    assert trace(step, 2017, device=device, values="none").warnings == ()
    with pytest.raises(UnknownValueError, match="unless output_size= says it"):
        trace(step, None, device=device, values="none")


def test_all_that_are_kept_for_real_are_equal() -> None:
    def step() -> Tensor:
        x = torch.randn(3000, 64).abs() + 1
        return x[x.sum(1) > 0].sum()

    assert differences(trace(step, host="here", values="none"), measure(step)) == {}


def test_sizes_that_do_not_fit_together_are_told() -> None:
    def step() -> Tensor:
        x = torch.randn(4000, 64)
        return (x[x.sum(1) > 60] + torch.ones(17, 64)).sum()

    with pytest.raises(RuntimeError, match="must match") as caught:
        trace(step, values="none")
    (note,) = caught.value.__notes__
    assert "count as the largest that they can be" in note
    assert "indexed with a mask of unknown values" in note


def test_an_error_of_the_program_says_what_was_guessed_before_it() -> None:
    def step() -> None:
        assert torch.randn(3000, 8).softmax(1).sum().item() > 2999

    with pytest.raises(AssertionError) as caught:
        trace(step, values="none")
    (note,) = caught.value.__notes__
    assert "pass values='auto' or values='real'" in note
    assert "test_assumed.py" in note
    trace(step)


def step(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], None]:
    def program() -> None:
        inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
        function(*inputs).sum().backward()

    return program


@pytest.mark.parametrize(
    "program",
    [
        step(torch.mm, (3, 5), (5, 7)),
        step(torch.bmm, (2, 3, 5), (2, 5, 7)),
        step(torch.addmm, (7,), (3, 5), (5, 7)),
        step(torch.baddbmm, (2, 3, 7), (2, 3, 5), (2, 5, 7)),
        step(functional.conv1d, (2, 4, 9), (6, 4, 3)),
        step(lambda x, w: functional.conv2d(x, w, stride=2, padding=1), (2, 4, 9, 8), (6, 4, 3, 3)),
        step(lambda x, w: functional.conv2d(x[0], w), (1, 4, 9, 8), (6, 4, 3, 3)),
        step(functional.conv_transpose2d, (2, 4, 5, 6), (4, 3, 2, 2)),
        step(functional.conv3d, (1, 2, 5, 5, 5), (3, 2, 2, 2, 2)),
    ],
    ids=["mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "no batch", "transposed", "conv3d"],
)
def test_multiplications_are_those_of_torch(program, monkeypatch):
    counted: list[int] = []
    original = contents.operations_of

    def operations_of(call: Any, plan: Any) -> int:
        outputs = contents.argument_leaves(plan.outputs, contents.Output)
        elements = sum(tensor.numel() for tensor in call.tensors)
        elements += sum(torch.Size(output.shape).numel() for output in outputs)
        counted.append(original(call, plan) - elements)
        return counted[-1] + elements

    def affords(self: contents.ValuesBudget, live: int, call: Any, plan: Any) -> bool:
        plan.cost = None  # of a call of the same geometry before
        return afforded(self, live, call, plan)

    afforded = contents.ValuesBudget.affords
    monkeypatch.setattr(contents.ValuesBudget, "affords", affords)
    monkeypatch.setattr(contents.ValuesBudget, "is_cheap", lambda self, cost: False)
    monkeypatch.setattr(contents, "operations_of", operations_of)
    trace(program)
    with FlopCounterMode(display=False) as mode:
        program()
    assert 2 * sum(counted) == mode.get_total_flops() > 0
