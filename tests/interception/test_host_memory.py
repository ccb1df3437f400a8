"""What a step has in the host's memory, whatever it is that allocates it."""

import queue
from collections import deque
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.diagnosis.diagnose import step_growth
from tests.processes import beside
from tests.results import as_measured

ROWS = 1000
BYTES = ROWS * 100 * 4


def test_what_is_offloaded_counts_on_the_host() -> None:
    def program(saves: bool) -> None:
        layers = nn.Sequential(*[nn.Linear(100, 100) for _ in range(3)]).cuda()
        x = torch.randn(ROWS, 100, device="cuda")
        with torch.autograd.graph.save_on_cpu() if saves else torch.enable_grad():
            y = layers(x).sum()
        y.backward()

    plain, offloaded = (torchmem.trace(lambda s=s: program(s), device="cuda") for s in (0, 1))
    assert plain.host_peak == 3 * (100 * 100 + 100) * 4
    assert offloaded.host_peak == 3 * BYTES + 2 * 100 * 100 * 4  # inputs, weights


def test_pinned_memory_counts_on_the_host() -> None:
    profile = torchmem.trace(lambda: torch.empty(ROWS, 100, pin_memory=True).cuda(), device="cuda")
    assert profile.host_peak == BYTES


def test_numbers_alone_are_no_peak() -> None:
    options = {"device": "cuda", "optimizer": torch.optim.AdamW, "steps": 2}
    profile = torchmem.trace(nn.Linear(10, 10), torch.randn(2, 10), **options)
    assert profile.host_peak is None
    assert "host_peak" not in profile.figures()


def array() -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    return np.zeros((ROWS, 100), np.float32)


FOREIGN: dict[str, Callable[[], torch.Tensor]] = {
    "from_numpy": lambda: torch.from_numpy(array()),
    "as_tensor": lambda: torch.as_tensor(array()),
    "asarray": lambda: torch.asarray(array()),
    "frombuffer": lambda: torch.frombuffer(bytearray(BYTES), dtype=torch.float32),
    "from_dlpack": lambda: torch.from_dlpack(array()),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_memory_of_others_counts_on_the_host_alone(name: str, device: str) -> None:
    def program() -> None:
        made = FOREIGN[name]()
        made.zero_()

    profile = torchmem.trace(program, device=device)
    assert (profile.peak, profile.host_peak) == (0, BYTES)


@pytest.mark.parametrize("name", ["as_tensor", "asarray"])
def test_an_array_is_copied_to_the_gpu(name: str) -> None:
    profile = torchmem.trace(lambda: getattr(torch, name)(array(), device="cuda"), device="cuda")
    assert (profile.peak, profile.host_peak) == (BYTES, BYTES)


def test_what_is_saved_into_memory_counts_as_long_as_it_is_there(device: str) -> None:
    sizes: list[int] = []

    def program(kept: int) -> None:
        files = deque[BytesIO](maxlen=kept)
        tensor = torch.zeros(ROWS, 100, device=device)
        for _ in range(4):
            files.append(BytesIO())
            torch.save(tensor, files[-1])
            torch.save(tensor, files[-1])
        sizes[:] = [len(one.getvalue()) for one in files]

    for kept in (1, 4):
        profile = torchmem.trace(lambda kept=kept: program(kept), device=device)
        assert len(sizes) == kept
        assert min(sizes) > 2 * BYTES
        assert profile.host_peak == sum(sizes) + (BYTES if device == "cpu" else 0)


def test_memory_of_others_that_was_there_before(device: str) -> None:
    brought, views = torch.from_numpy(array()), torch.from_numpy(array())

    def program() -> None:
        brought.zero_()
        views[:10].zero_()
        views[10:].zero_()

    profile = torchmem.trace(program, device=device)
    assert (profile.peak, profile.host_peak) == (0, 2 * BYTES)


def test_memory_that_numpy_was_shown_is_the_allocators() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    assert [one.detach().numpy().nbytes for one in (*model.parameters(), x)] == [1024, 64, 256]

    def step(model: nn.Module, x: torch.Tensor) -> None:
        model(x).sum().backward()

    assert as_measured(step, model, x).host_peak is None


def test_an_array_counts_once() -> None:
    def program() -> None:
        shared = array()
        several = [torch.from_numpy(shared) for _ in range(3)]
        del several

    assert torchmem.trace(program).host_peak == BYTES

    def program() -> None:
        kept = [torch.from_numpy(np.zeros(1000, np.float32)) for _ in range(50)]
        del kept

    assert torchmem.trace(program).host_peak == 50 * 4000


def test_a_saved_profile_has_the_host(tmp_path: Path) -> None:
    profile = torchmem.trace(FOREIGN["from_numpy"])
    path = tmp_path / "profile.json"
    profile.save(path)
    read = torchmem.MemoryProfile.load(path)
    assert (read.host_peak, read.host_timeline) == (profile.host_peak, profile.host_timeline)


def test_what_stays_on_the_host_is_growth() -> None:
    def program() -> None:
        weight, kept = torch.randn(100, 100, device="cuda", requires_grad=True), []
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(5):
            y = torch.randn(ROWS, 100, device="cuda") @ weight
            y.sum().backward()
            optimizer.step()
            kept.append(y.detach().cpu())

    assert step_growth(torchmem.trace(program, device="cuda").host_timeline).most == BYTES


class Arrays(torch.utils.data.Dataset[object]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> object:
        return np.zeros((ROWS, 100), np.float32)


@pytest.mark.parametrize(("workers", "times"), [(0, 6), (1, 4)])
def test_batches_of_arrays_count_on_the_host(workers: int, times: int) -> None:
    """Beside a batch, the next one and, where they are loaded in the process, its rows."""

    def program() -> None:
        for batch in torch.utils.data.DataLoader(Arrays(), batch_size=2, num_workers=workers):
            batch.cuda()

    assert torchmem.trace(program, device="cuda").host_peak == times * BYTES


def test_what_an_earlier_thread_hands_over_is_booked_and_told() -> None:
    asked: queue.Queue[int] = queue.Queue()
    made: queue.Queue[torch.Tensor] = queue.Queue()

    def work() -> None:
        while rows := asked.get():
            made.put(torch.zeros(rows, 100))

    def program() -> None:
        for _ in range(3):
            asked.put(ROWS)
            made.get().zero_()

    with beside(work, lambda: asked.put(0)):
        profile = torchmem.trace(program)
    assert profile.peak == BYTES
    (warning,) = profile.warnings
    assert "a thread that was there before the trace" in warning
    line = program.__code__.co_firstlineno + 3
    assert f"test_host_memory.py:{line}:" in warning
