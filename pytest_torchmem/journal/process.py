"""What a traced program may change of the interpreter and of its thread, put back afterwards."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pytest_torchmem.profile.later import without_collections
from pytest_torchmem.step.generators import current_draws, is_alone
from pytest_torchmem.step.imports import imports_apart
from pytest_torchmem.torch_private.state.all_settings import (
    NOT_SAID,
    Setting,
    all_settings,
    answer,
    answers,
)

_NUMPY = "numpy.random"


@contextmanager
def process_kept(
    compiling: AbstractContextManager[object], on_thread: Callable[[], bool]
) -> Iterator[None]:
    """Put back random generators, torch's settings, the garbage collector.

    What of torch is imported meanwhile keeps nothing of the program. ``compiling`` decides about
    what ``torch.compile`` wraps.
    """
    settings = (*all_settings(), _OF_ACCELERATE)
    program = program_kept(compiling, on_thread)
    with generators_kept(seeded=True), settings_kept(settings), program:
        yield


@contextmanager
def settings_kept(settings: Sequence[Setting], of_thread: bool = False) -> Iterator[None]:
    """Undo what a program sets: its trace on the next device begins as this one.

    In a process that another thread forked there are no settings ``of_thread`` any more.
    """
    thread, before = threading.get_ident(), answers(settings)
    try:
        yield
    finally:
        is_there = not of_thread or threading.get_ident() == thread
        if is_there and answers(settings) != before:
            # In order: one that is put back may change what another says.
            for setting, value in zip(settings, before, strict=True):
                if value is not NOT_SAID and answer(setting) != value:
                    setting.set_to(value)


def _shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    if module is None:
        return []
    found = [getattr(one, "_shared_state", None) for one in vars(module).values()]
    return [state for state in found if isinstance(state, dict)]


def _shared_contents() -> list[dict[str, Any]]:
    return [dict(state) for state in _shared_states()]


def _share(before: list[dict[str, Any]]) -> None:
    known = before or [{}] * len(_shared_states())
    for state, contents in zip(_shared_states(), known, strict=True):
        state.clear()
        state.update(contents)


#: What accelerate knows of the process: its rank, device and precision. It is asked once in a
#: process (accelerate/state.py, ``PartialState``), and the next trace may be of another rank.
_OF_ACCELERATE = Setting(_shared_contents, _share)


@contextmanager
def program_kept(
    compiling: AbstractContextManager[object] | None = None,
    on_thread: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Put back what is no choice of the program, and would be in the way of following it.

    ``from_pretrained`` of transformers reads weights on the program's thread meanwhile, which is
    followed, rather than in a pool (core_model_loading.py of transformers 5). Calls of modules that
    are followed are half as deep again in Python: so is what it allows.
    """
    limit = sys.getrecursionlimit()
    read_here = environment("HF_DEACTIVATE_ASYNC_LOAD", "1")
    with without_collections(), imports_apart(on_thread), read_here, compiling or nullcontext():
        sys.setrecursionlimit(limit * 3 // 2)
        try:
            yield
        finally:
            if sys.getrecursionlimit() == limit * 3 // 2:  # and not what the program has set
                sys.setrecursionlimit(limit)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Have an environment variable be ``value``."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def generators_kept(seeded: bool = False) -> Iterator[None]:
    """Leave the host's random generators as they were; ``seeded``: they begin as in every trace.

    Other threads may be drawing from them, and would draw the same again: beside others they are
    neither seeded nor put back, and a trace's threads have their own (``own_generators``).
    """
    if seeded and not is_alone():
        yield
        return
    default = torch.default_generator
    state, python_state = default.get_state(), random.getstate()
    # numpy imports it when it is first used, which takes longer than a small trace.
    numpy_state = sys.modules[_NUMPY].get_state() if _NUMPY in sys.modules else None
    draws, start = current_draws(), None
    if seeded:
        default.manual_seed(0)
        start = draws.seed_python(random)
        seed_what_is_imported(_NUMPY)
    try:
        yield
    finally:
        if seeded:
            draws.note(random, start)
        torch.set_rng_state(state)
        random.setstate(python_state)
        if numpy_state is not None:
            sys.modules[_NUMPY].set_state(numpy_state)
        elif _NUMPY in sys.modules:
            sys.modules[_NUMPY].seed()


def seed_what_is_imported(name: str) -> None:
    """Give numpy's generator the seed of a trace, when it is imported or where it is already."""
    if name == _NUMPY and name in sys.modules:
        current_draws().seed_numpy(sys.modules[name])
