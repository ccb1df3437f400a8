"""Memory tests that check nothing: skipped, often for want of a GPU, which no trace needs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.plugin.seen import checks_memory

if TYPE_CHECKING:
    from pytest_torchmem.plugin.checker import Checker

_OF_A_GPU = re.compile(r"cuda|gpu|nvidia|accelerator", re.IGNORECASE)
NEVER_CHECKED = (
    "never checked, because they are skipped where there is no GPU: run pytest with "
    "--torchmem-fake-cuda=h100, or remove the skipif, since a traced test needs no GPU"
)


SKIPPED = "never checked, because they were skipped"
UNUSED = "passed without a check: nothing in them called torchmem.check"


def note_skip(
    item: pytest.Item, call: pytest.CallInfo[None], checker: Callable[[pytest.Item], Checker]
) -> None:
    """Record a memory test as never checked that was skipped, before its first check or whole."""
    excinfo = call.excinfo
    if excinfo is None or not checks_memory(item) or not _was_skipped(call, excinfo):
        return
    asked = checker(item)
    if not asked.checked and not asked.context.settings.disabled:
        notice = NEVER_CHECKED if any(map(_asks_for_gpu, _texts(item, excinfo))) else SKIPPED
        asked.not_checked(f"never checked: {_reason(excinfo)}", notice=notice)


def note_unused(item: pytest.Item, asked: Checker) -> None:
    """Record a test as never checked that asks for the fixture itself, and used it for nothing."""
    if asked.checked or asked.traced or asked.context.settings.disabled:
        return
    function = getattr(item, "function", None)
    if function is not None and "torchmem" in inspect.signature(function).parameters:
        asked.not_checked("never checked: nothing called torchmem.check", notice=UNUSED)


def _was_skipped(call: pytest.CallInfo[None], excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    """Tell a test that did not run from one that failed as expected: ``xfail(run=False)``."""
    not_run = call.when == "setup" and excinfo.errisinstance(pytest.xfail.Exception)
    return not_run or excinfo.errisinstance(pytest.skip.Exception)


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
