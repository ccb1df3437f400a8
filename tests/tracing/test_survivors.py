"""What a program keeps beyond a trace, in caches and objects, does no harm to the next one."""

import functools
import gc
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch

import pytest_torchmem as torchmem
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.conversion import forget_cached
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.torch_private.tensors import bytes_of, hollow_storage

SIDE = 1500  # too large for the values of a first pass


@pytest.fixture
def library() -> Any:
    """Return a class that keeps a table for everybody who asks for it."""

    class Library:
        tables: dict[int, Any] = {}  # noqa: RUF012

        @classmethod
        def table(cls, size: int, device: torch.device) -> torch.Tensor:
            if size not in cls.tables:
                cls.tables[size] = (torch.ones(size, size, device=device).tril(),)
            found: torch.Tensor = cls.tables[size][0]
            assert found.device == device
            return found

    return Library


def test_shown_memory_lives_as_long_as_its_storage() -> None:
    memory = torch.ones(1 << 20, dtype=torch.uint8)
    gone, shown = weakref.ref(memory), bytes_of(hollow_storage(memory.nbytes, memory))
    del memory
    assert gone() is not None
    assert shown.sum() == 1 << 20
    del shown
    assert gone() is None


@pytest.mark.parametrize("maxsize", [None, 4])
def test_a_cached_function_is_asked_anew_in_each_trace(maxsize):
    @functools.lru_cache(maxsize=maxsize)
    def positions(size: int, device: torch.device) -> dict[str, tuple[torch.Tensor]]:
        return {"sin": (torch.arange(size, device=device).float().sin(),)}

    def step() -> torch.Tensor:
        x = torch.randn(SIDE, SIDE, device="cuda")
        return (x + positions(SIDE, x.device)["sin"][0]).sum().cpu()

    first = torchmem.trace(step, device="cuda")
    assert not positions.cache_info().currsize
    assert torchmem.trace(step, device="cuda").figures() == first.figures()


def test_a_view_whose_base_was_written_to_since_is_looked_at_as_it_is() -> None:
    base = torch.ones(4, dtype=torch.complex64, requires_grad=True) * 1
    view = torch.view_as_real(base)
    base.mul_(2)  # the view's node is made anew when it is next asked for
    table = functools.lru_cache(torch.ones)
    torchmem.trace(lambda: table(3).sum())
    assert view.grad_fn is not None


def test_caches_without_tensors_are_left_alone():
    half, kept = functools.lru_cache(lambda number: number / 2), []
    torchmem.trace(lambda: kept.append(torch.ones(int(half(8)))))
    assert half.cache_info().currsize == 1


def test_a_cache_of_a_class_is_filled_anew_by_a_second_pass(library: Any) -> None:
    def step() -> bool:
        x = torch.rand(SIDE, SIDE, device="cuda")
        return bool((x * library.table(SIDE, x.device)).sum() > 0)

    profile = torchmem.trace(step, device="cuda")
    assert profile.values != "none"
    assert [one.nbytes for one in profile.timeline.allocations].count(SIDE * SIDE * 4) == 4


def test_a_dictionary_that_loads_what_it_is_asked_for_is_not_asked(library: Any) -> None:
    class Lazy(OrderedDict[str, Any]):
        def items(self) -> Any:
            raise ImportError("a module that is not installed")

        values = keys = items

    library.lazy = Lazy()

    def step() -> bool:
        x = torch.rand(SIDE, SIDE, device="cuda")
        library.tables[SIDE] = (x * 2,)
        return bool(library.tables[SIDE][0].sum() > 0)

    assert torchmem.trace(step, device="cuda").values == "real"


def test_what_the_last_trace_left_is_on_its_device_from_the_beginning() -> None:
    held = threading.local()  # into which nobody looks

    def step() -> torch.Tensor:
        if not hasattr(held, "table"):
            held.table = torch.ones(SIDE, SIDE, device="cuda").tril()
        found: torch.Tensor = held.table
        assert found.device == torch.device("cuda:0")
        return found.view(-1) * 2

    first = torchmem.trace(step, device="cuda")
    later = torchmem.trace(step, device="cuda")
    assert later.peak == first.peak
    assert later.timeline.allocations[0].origin.phase is Phase.BASELINE
    assert torchmem.trace(step, device="cuda").figures() == later.figures()


def test_values_that_are_gone_are_told_of() -> None:
    kept: dict[str, torch.Tensor] = {}
    torchmem.trace(lambda: kept.update(noise=torch.randn(SIDE, SIDE, device="cuda")), device="cuda")
    assert kept["noise"].isnan().all()
    with pytest.raises(UnknownValueError, match="an earlier trace left behind"):
        torchmem.trace(lambda: bool(kept["noise"].sum() > 0), device="cuda")


def test_values_that_were_computed_stay() -> None:
    kept: dict[str, torch.Tensor] = {}

    def first() -> None:
        kept["weight"] = torch.full((8, 8), 2.0, device="cuda").t() @ torch.eye(8, device="cuda")

    def second() -> float:
        assert kept["weight"].is_cuda
        kept["sum"] = kept["weight"].sum()
        return 1.0 if kept["sum"] == 128 else pytest.fail("another branch")

    torchmem.trace(first, device="cuda")
    assert kept["weight"].sum() == 128
    assert torchmem.trace(second, device="cuda").peak == 8 * 8 * 4 + 4 + 1  # sum and its comparison


def test_a_table_that_the_collector_changes_is_gone_through(library: Any) -> None:
    goes_on = [True]

    class Cycle:
        """Garbage that, whenever it is collected, changes the table and is there again."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if goes_on and library.tables.pop(-1, None) is None:
                library.tables[-1] = 0
            if goes_on:
                Cycle()

    torchmem.trace(lambda: library.table(4, torch.device("cpu")))
    library.tables.update(dict.fromkeys(range(5, 3000), 0))
    before = gc.get_threshold()
    try:
        gc.set_threshold(5)
        Cycle()
        forget_cached()
    finally:
        gc.set_threshold(*before)
        goes_on.clear()
    assert 4 not in library.tables


def test_views_that_refuse_to_say_whether_they_are_leaves() -> None:
    """Of a program that keeps one, and of the process that traces it."""

    def stale(device: str = "cpu") -> torch.Tensor:
        whole = torch.ones(4, requires_grad=True, device=device) * 1
        with torch.no_grad():
            view = whole[:2]
        whole.mul_(2)
        return view

    mine = stale()
    with pytest.raises(RuntimeError, match="no_grad mode"):
        _ = mine.is_leaf

    def program() -> None:
        kept = stale("cuda")
        raise KeyError(kept.shape[0])

    with pytest.raises(KeyError) as caught:  # its frames keep what is in them
        torchmem.trace(program, device="cuda")
    kept = caught.traceback[-1].locals["kept"]
    assert kept.tolist() == [2, 2]
    assert mine.tolist() == [2, 2]
