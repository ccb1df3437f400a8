"""Memory tests that are skipped for want of a GPU, which no trace needs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.plugin.collection import checks_memory

if TYPE_CHECKING:
    from pytest_torchmem.plugin.checker import Checker

_OF_A_GPU = re.compile(r"cuda|gpu|nvidia|accelerator", re.IGNORECASE)
NEVER_CHECKED = (
    "never checked, because they are skipped where there is no GPU: run pytest with "
    "--torchmem-fake-cuda=h100, or remove the skipif, since a traced test needs no GPU"
)


def note_skip(
    item: pytest.Item,
    excinfo: pytest.ExceptionInfo[BaseException] | None,
    checker: Callable[[pytest.Item], Checker],
) -> None:
    """Record a memory test as never checked where a ``skipif`` that asks for a GPU skipped it."""
    if excinfo is None or not excinfo.errisinstance(pytest.skip.Exception):
        return
    if not checks_memory(item) or not any(map(_asks_for_gpu, _texts(item, excinfo))):
        return
    asked = checker(item)
    if not asked.context.settings.disabled:
        asked.not_checked(f"never checked: {_reason(excinfo)}", notice=NEVER_CHECKED)


def _reason(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    return str(getattr(excinfo.value, "msg", "") or excinfo.value)


def _texts(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """Return what tells why: the reason, conditions that are texts, and how marks are written."""
    marks = list(item.iter_markers("skipif"))
    if not marks:  # a fixture skipped, or the test's module
        return [_reason(excinfo)]
    texts = [str(argument) for mark in marks for argument in (*mark.args, *mark.kwargs.values())]
    return [*texts, _decorators(getattr(item, "function", None)), _reason(excinfo)]


def _decorators(function: Any) -> str:
    """Return the source of a function up to its ``def``."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return re.split(r"^\s*(?:async\s+)?def\s", source, maxsplit=1, flags=re.MULTILINE)[0]


def _asks_for_gpu(text: str) -> bool:
    # "not torch.cuda.is_available()" of a mark, its name, or "needs a GPU"
    without_marker = re.sub(r"memory_budget\(.*?\)", "", text, flags=re.DOTALL)
    return _OF_A_GPU.search(without_marker) is not None
