"""A process that is forked in the course of a trace is a program of its own."""

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pytest_torchmem import trace
from tests.processes import in_thread
from tests.results import as_measured, in_a_trace

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(8.0).view(2, 4) * index
        assert rows.sum().item() == 28 * index  # a hollow tensor has no such number
        return rows.sum(0), torch.tensor(index)


@in_a_trace()
def test_workers_load_what_a_traced_program_trains_on(device: str) -> None:
    labels: list[int] = []
    model = nn.Linear(4, 10).to(device)
    pins = device == "cuda"
    for data, label in DataLoader(Samples(), batch_size=5, num_workers=1, pin_memory=pins):
        assert data.is_pinned() is label.is_pinned() is pins
        assert not any("pin_memory" in thread.name for thread in threading.enumerate())
        labels.extend(label.tolist())
        data, label = data.to(device, non_blocking=True), label.to(device, non_blocking=True)
        nn.functional.cross_entropy(model(data), label).backward()
    assert labels == list(range(10))


def test_batches_of_workers_are_counted() -> None:
    def program() -> None:
        for data, _ in DataLoader(Samples(), batch_size=5, num_workers=1):
            data * 2

    as_measured(program)


def in_forked_process(body: Callable[[], object]) -> str:
    """Return the text of what ``body`` returned, or raised, in a forked process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            text = repr(body())
        except BaseException as error:
            text = repr(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.parametrize("on_another_thread", [False, True])
def test_a_forked_process_finds_torch_as_it_is(on_another_thread: bool) -> None:
    texts: list[str] = []

    def program() -> None:
        weight = torch.ones(1 << 40, device="cuda")

        def body() -> list[object]:
            traced = trace(lambda: kept.append(torch.ones(5)), device="cpu").peak
            values = [torch.ones(3).sum().item(), weight[0].isnan().item(), weight.device.type]
            wrapped = hasattr(torch.cuda.is_available, "__wrapped__")
            return [*values, wrapped, torch.is_grad_enabled(), traced]

        kept: list[Tensor] = []
        with torch.set_grad_enabled(on_another_thread):

            def fork() -> str:
                return in_forked_process(body)

            texts.append(in_thread(fork) if on_another_thread else fork())
        assert torch.ones(2, device="cuda").is_cuda

    with torch.set_grad_enabled(not on_another_thread):
        trace(program, device="cuda")
    assert texts == [repr([3.0, True, "cpu", False, True, 20])]


def test_a_process_forked_while_a_trace_begins_or_ends_finds_torch_as_it_is() -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    trace(model, x, device="cuda")
    owners = torch, torch.cuda, Tensor, nn.Module
    before = [dict(vars(owner)) for owner in owners]
    codes = nn.Module.__call__.__code__
    texts: list[str] = []

    def changed() -> list[object]:
        pairs = [(one, vars(owner)) for one, owner in zip(before, owners, strict=True)]
        now = [name for one, is_ in pairs for name in one if is_.get(name) is not one[name]]
        return [now, nn.Module.__call__.__code__ is codes, torch.ones(3).sum().item()]

    def fork() -> None:
        for step in range(0, 40, 3):
            time.sleep(step * 1e-4)
            texts.append(in_forked_process(changed))

    thread = threading.Thread(target=fork)
    thread.start()
    while thread.is_alive():
        trace(model, x, device="cuda")
    assert set(texts) == {repr([[], True, 3.0])}
