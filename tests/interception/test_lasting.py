"""Functions that stand in torch's place are made once, and belong to the trace that runs."""

import gc
import importlib
import sys
import threading

import torch
from torch import nn

from pytest_torchmem import trace
from tests.results import result_of


def ask(found: list[int], device: str) -> None:
    tensor = torch.empty(3, device=device)
    found.append(tensor.untyped_storage().nbytes() + torch.tensor([tensor.shape[0]]).item())


def test_another_function_that_was_put_there_between_traces_is_called(device, monkeypatch):
    own, called = torch.tensor, []

    def another(*args: object, **kwargs: object) -> torch.Tensor:
        called.append(args)
        return own(*args, **kwargs)

    found: list[int] = []
    trace(lambda: ask(found, device), device=device)
    monkeypatch.setattr(torch, "tensor", another)
    trace(lambda: ask(found, device), device=device)
    assert torch.tensor is another
    assert len(called) == 1
    monkeypatch.undo()
    trace(lambda: ask(found, device), device=device)
    assert len(called) == 1
    assert found == [15, 15, 15]


def test_a_function_that_a_program_keeps_belongs_to_no_trace_afterwards(device: str) -> None:
    make, item = result_of(lambda: (torch.empty, torch.Tensor.item), device=device)
    assert item(make(2).fill_(3.0).sum()) == 6.0


def test_traces_between_those_with_threads_have_the_same_figures(device: str) -> None:
    def beside() -> None:
        torch.empty(5, device=device).sum().item()

    def program(threads: int) -> None:
        started = [threading.Thread(target=beside) for _ in range(threads)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        beside()

    peaks = [trace(program, threads, device=device).peak for threads in (0, 2, 0, 1, 0)]
    assert peaks[0] == peaks[2] == peaks[4]


def test_a_trace_that_is_over_is_freed(device: str) -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(3):
        trace(model, input, device=device)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        trace(model, input, device=device)
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_a_module_that_was_imported_anew_makes_its_own() -> None:
    """Runs of pytest within a process, as plugins' tests have them, import modules again."""
    name = "pytest_torchmem.fake_cuda.api.session"
    available: list[bool] = []

    def ask_for_cuda() -> None:
        available.append(torch.cuda.is_available())

    trace(ask_for_cuda, device="cuda")
    before = {one: module for one, module in sys.modules.items() if one.startswith("pytest_torch")}
    kept = ("pytest_torchmem.torch_private", "pytest_torchmem.interception.context")
    try:
        for one in before:
            if not one.startswith(kept):
                del sys.modules[one]
        importlib.import_module("pytest_torchmem").trace(ask_for_cuda, device="cuda")
        assert sys.modules[name] is not before[name]
    finally:
        sys.modules.update(before)
    trace(ask_for_cuda, device="cuda")
    assert available == [True, True, True]
