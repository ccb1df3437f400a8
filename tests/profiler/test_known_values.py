"""Small integers, booleans and tables keep their values; the rest is asked for in vain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.profiler.internals import TORCH_VERSION


def test_control_flow_and_shapes_follow_known_values() -> None:
    seen: list[object] = []

    def program() -> None:
        mask = torch.tensor([True, False, True, False])
        lengths = torch.tensor([3, 5, 2])
        x = torch.randn(4, 8)
        seen.append(bool(mask.any()))
        seen.append(int(lengths.max()))
        seen.append(tuple(x[mask].shape))
        seen.append(tuple(mask.nonzero().shape))
        seen.append(torch.unique(torch.tensor([1, 1, 2])).tolist())
        x[mask] = 0.0
        steps = torch.zeros(())
        steps += 1
        seen.append(steps.item())
        seen.append([rate.item() for rate in torch.linspace(0, 1, 3)])
        positions = torch.arange(6).view(2, 3)[:, 1:] + 1
        seen.append(positions.tolist())
        seen.append((torch.arange(5) % 3).tolist())
        seen.append((torch.arange(5) > lengths[:, None]).sum().item())

    trace(program)
    assert seen == [
        True,
        5,
        (2, 8),
        (2, 1),
        [1, 2],
        1.0,
        [0.0, 0.5, 1.0],
        [[2, 3], [5, 6]],
        [0, 1, 2, 0, 1],
        3,
    ]


def test_inputs_keep_their_values() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x[mask] if mask.any() else x

    x = torch.randn(4, 8, requires_grad=True)
    some = trace(Picks(), x, torch.tensor([True, False, False, False]))
    none = trace(Picks(), x, torch.zeros(4, dtype=torch.bool))
    assert some.retained != none.retained


def test_user_tensors_are_not_written_to() -> None:
    counter = torch.tensor(3)

    def program() -> int:
        counter.add_(1)
        return int(counter)

    trace(program)
    assert counter.item() == 3


def test_unknown_floating_number_is_nan_with_one_warning() -> None:
    seen = []

    def program() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        loss = x.sum()
        loss.backward()
        seen.extend([loss.item(), float(loss)])

    profile = trace(program)
    assert all(value != value for value in seen)
    assert len(profile.warnings) == 1
    assert "test_known_values.py" in profile.warnings[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.argmax().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
    ],
    ids=["bool", "nonzero", "mask", "argmax", "tolist", "numpy"],
)
def test_unknown_values_raise_with_the_line(ask: object) -> None:
    def program() -> None:
        ask(torch.randn(4, 8))  # type: ignore[operator]

    with pytest.raises(UnknownValueError, match=r"test_known_values\.py:\d+") as raised:
        trace(program)
    assert "Pass such an input with its real values" in str(raised.value)


def test_a_value_written_over_is_forgotten() -> None:
    def program() -> None:
        flags = torch.ones(4, 4, dtype=torch.bool)
        flags.copy_(torch.randn(4, 4) > 0)
        bool(flags.any())

    with pytest.raises(UnknownValueError):
        trace(program)


def test_random_numbers_are_the_same_every_time() -> None:
    def program() -> Tensor:
        length = int(torch.randint(1, 1000, ()))
        return torch.ones(length)

    assert trace(program).figures() == trace(program).figures()


def test_values_written_by_composites_and_to_outputs_are_known() -> None:
    def program() -> None:
        flags = torch.tensor([True, False]).logical_and_(torch.tensor([True, True]))
        assert flags.tolist() == [True, False]
        total = torch.zeros(2, dtype=torch.int64)
        torch.add(torch.tensor([1, 2]), torch.tensor([3, 4]), out=total)
        assert total.tolist() == [4, 6]
        if TORCH_VERSION < (2, 15):  # later ones read values without an operator
            torch.randn(3000).quantile(0.5)  # checks that 0.5 is between 0 and 1

    trace(program)


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (3.0, 4.0)], ids=["wide", "narrow"])
def test_initialisers_that_draw_again(bounds: tuple[float, float]) -> None:
    """Whether a draw fell out of bounds is not known, and every first one counts as accepted."""

    def program() -> None:
        layer = nn.Linear(64, 64)
        nn.init.trunc_normal_(layer.weight, 0.0, 0.02 if bounds[0] < 0 else 1.0, *bounds)
        nn.init.orthogonal_(layer.weight)
        layer(torch.ones(2, 64)).sum().backward()

    assert trace(program).backward_peak > 2 * 64 * 64 * 4


def test_one_hot_of_classes_that_are_not_known() -> None:
    """A router's choice, in a given number of classes, has a shape that is known."""

    def program() -> None:
        logits = torch.randn(3, 7, requires_grad=True)
        chosen = nn.functional.one_hot(logits.argmax(-1), num_classes=7)
        (chosen * logits.softmax(-1)).sum().backward()

    traced, measured = trace(program, host="here"), measure(program)
    assert traced.figures() == measured.figures()
    with pytest.raises(UnknownValueError):
        trace(lambda: nn.functional.one_hot(torch.randn(3, 7).argmax(-1)))
