"""What a program or a test has put in the place of torch's functions stays there in a trace."""

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.torch_private.function_holders import is_of_program
from pytest_torchmem.torch_private.patches import Patch
from tests.results import result_of

SOMETHING = object()


def replaced_functions() -> list[tuple[Any, str, Any]]:
    """Return owners, names and originals of all that a trace on fake cuda replaces."""
    found: list[tuple[Any, str, Any]] = []

    def step() -> None:
        torch.zeros(1, device="cuda")
        found.extend(one for patch in Patch.standing.values() for one in patch.stood_before())

    trace(step, device="cuda")
    return found


def test_torch_has_put_nothing_of_a_program_there() -> None:
    replaced = replaced_functions()
    assert len(replaced) > 400
    assert [name for owner, name, found in replaced if is_of_program(owner, name, found)] == []


def make_class(return_value: object) -> type:
    """Return a class of a test's own, whose instances are never made."""
    return type("Own", (), {"__new__": lambda *_, **__: return_value})


def make_function(return_value: object) -> Any:
    """Return a function that returns ``return_value``."""
    return lambda *_, **__: return_value


@pytest.mark.parametrize("make", [Mock, make_function, make_class])
@pytest.mark.parametrize(
    "name",
    [
        "cuda.is_available",
        "cuda.device_count",
        "cuda.get_device_properties",
        "cuda.max_memory_allocated",
        "cuda.memory.empty_cache",
        "cuda.Stream",
        "cuda.Event",
        "Generator",
        "accelerator.device_count",
        "manual_seed",
        "get_rng_state",
        "randn",
        "zeros_like",
        "fft.fftfreq",
        "load",
        "save",
        "jit.load",
        "Tensor.cuda",
        "Tensor.item",
        "nn.Module.to",
    ],
)
def test_a_mock_is_what_the_program_calls(make, name, monkeypatch):
    path, _, attribute = f"torch.{name}".rpartition(".")
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    mock = make(return_value=SOMETHING)
    monkeypatch.setattr(owner, attribute, mock)
    assert result_of(lambda: getattr(owner, attribute)(None), device="cuda") == SOMETHING
    assert vars(owner)[attribute] is mock
    monkeypatch.undo()
    before = vars(owner).get(attribute)
    trace(lambda: torch.zeros(1, device="cuda"), device="cuda")
    assert vars(owner).get(attribute) is before


def spy(calls: list[str], original: Any) -> Any:
    """Return what notes a call and makes it."""

    def spied(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return spied


def test_a_spy_is_called_and_calls_what_a_trace_has_there() -> None:
    calls: list[str] = []
    wrapped = patch.object(torch.cuda, "get_device_name", wraps=torch.cuda.get_device_name)
    spied = patch.object(torch.cuda, "synchronize", side_effect=spy(calls, torch.cuda.synchronize))
    to_cuda = patch.object(torch.Tensor, "cuda", spy(calls, torch.Tensor.cuda))
    alike = patch.object(
        torch.cuda, "empty_cache", side_effect=spy(calls, torch.cuda.empty_cache), autospec=True
    )

    def step() -> None:
        nn.Linear(2, 2).cuda()(torch.zeros(1, 2).cuda()).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.get_device_name(0) == "NVIDIA A100-SXM4-80GB"

    plain = trace(step, device="cuda").figures()
    with wrapped as name, spied, to_cuda, alike as emptied:
        assert trace(step, device="cuda").figures() == plain
        assert calls[-2:] == ["synchronize", "empty_cache"]
        assert calls.count("cuda") == 3  # two parameters and the input
        name.assert_called_once_with(0)
        emptied.assert_called_once_with()
    assert torch.cuda.synchronize.__globals__["__name__"] == "torch.cuda"


def test_what_a_program_replaces_in_a_trace_stays_as_it_does_outside() -> None:
    before, ours = torch.cuda.device_count, Mock(return_value=4)

    def step() -> None:
        torch.zeros(1, device="cuda")
        torch.cuda.device_count = ours

    try:
        trace(step, device="cuda")
        assert torch.cuda.device_count is ours
    finally:
        torch.cuda.device_count = before


def test_what_is_put_back_too_late_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock made in a trace and undone after it would put the trace's function there for good."""
    before = torch.cuda.device_count

    def step() -> None:
        torch.zeros(1, device="cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    trace(step, device="cuda")
    monkeypatch.undo()
    trace(lambda: torch.zeros(1, device="cuda"), device="cuda")
    assert torch.cuda.device_count is before
