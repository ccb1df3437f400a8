"""What a trace takes for true of values that it does not know."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError


def activations() -> Tensor:
    """Unknown values, too many to be kept."""
    return torch.randn(100, 100) @ torch.randn(100, 100)


def answers(*questions: Callable[[Tensor], object]) -> tuple[list[bool], tuple[str, ...]]:
    found: list[bool] = []

    def program() -> None:
        x = activations()
        found.extend(bool(question(x)) for question in questions)

    return found, trace(program, values="none").warnings


def test_values_are_finite() -> None:
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
    )
    assert found == [True, True, False, False, True, False, True, False, False, False]
    assert warnings == ()


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
    for warning in warnings:
        assert "test_assumed.py:" in warning
        assert "comparison with an unknown value; unknown values are treated as 1" in warning


def test_what_is_settled_is_no_guess() -> None:
    found, warnings = answers(
        lambda x: (x.mean() > 3.0) & torch.isnan(x).any(),
        lambda x: (x.mean() < 3.0) | torch.isfinite(x).all(),
    )
    assert found == [False, True]
    assert warnings == ()


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


def test_equal_needs_values() -> None:
    with pytest.raises(UnknownValueError):
        answers(lambda x: torch.equal(x, x + 0.0))


def test_a_loop_that_waits_for_another_answer_ends() -> None:
    def program() -> None:
        x = activations()
        while (x > 0).any():
            x = x - 1.0

    with pytest.raises(
        UnknownValueError, match=r"test_assumed\.py:\d+: .*was read 1,000 times here"
    ):
        trace(program, values="none")


def test_distributions_take_their_arguments_for_valid() -> None:
    def program() -> None:
        x = activations()
        torch.distributions.Categorical(probs=x.softmax(-1)).sample()
        torch.distributions.Normal(x, x.exp()).rsample()
        torch.distributions.MultivariateNormal(x[:, 0], torch.eye(x.shape[0])).log_prob(x[:, 1])

    assert trace(program).warnings == ()


def test_a_mask_that_is_assumed_decides_no_shape() -> None:
    profile = trace(lambda: (lambda x: x[torch.isnan(x)])(activations()), values="none")
    (warning,) = profile.warnings
    assert "every element counts as kept" in warning


def test_a_tensor_equals_itself_and_none_of_another_shape() -> None:
    found, warnings = answers(
        lambda x: torch.equal(x, x),
        lambda x: torch.equal(x, x.view(-1)),
        lambda x: torch.equal(x[1:], x[1:]),
    )
    assert found == [True, False, True]
    assert warnings == ()


@given(st.lists(st.sampled_from(["and", "or", "not"]), max_size=6), st.booleans())
def test_assumptions_are_put_together_as_values_are(steps: list[str], first: bool) -> None:
    expected: list[bool] = []
    found: list[bool] = []

    def program() -> None:
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
        found.append(bool(value))
        expected.append(real)

    trace(program)
    assert found == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
