"""What is kept by values that nobody knows counts as all that there may be, and profiles say so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.operators.spec import spec_of
from tests.tracing.programs import differences

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
    "bincount": (aten.bincount.default, (torch.tensor([255, 3], dtype=torch.uint8),)),
    "bincount of weights": (
        aten.bincount.default,
        (torch.tensor([127], dtype=torch.int8), torch.tensor([1.0])),
    ),
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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("program", [selected, found, distinct], ids=lambda one: one.__name__)
def test_figures_are_at_most_those(program: Callable[[Tensor], Tensor], device: str) -> None:
    def step() -> Tensor:
        return program(torch.randn(5000, 64, device=device)).sum()

    guessed, real = (trace(step, device=device, values=values) for values in ("none", "real"))
    assert guessed.peak >= real.peak
    (*_, warning) = guessed.warnings
    assert "test_bounds.py:" in warning
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
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert = nn.Linear(64, 4), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.gate(x).argmax(1) == 2
            x[rows] = self.expert(x[rows])
            return x

    with torch.device("meta"):
        model = Routed()
    profile = trace(model, torch.randn(128, 64))
    assert profile.values == "guessed"
    assert "every element counts as kept" in profile.warnings[0]
    with pytest.raises(UnknownValueError, match="indexed with a mask of unknown values"):
        trace(model, torch.randn(128, 64), values="real")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
        classes = torch.randn(3000, 8).softmax(1)
        assert classes.sum().item() > 2999

    with pytest.raises(AssertionError) as caught:
        trace(step, values="none")
    (note,) = caught.value.__notes__
    assert "pass values='auto' or values='real'" in note
    assert "test_bounds.py" in note
    trace(step)
