"""What reports of pytest have of memory tests: checks, and why a test made none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from pytest_torchmem.figures import label
from pytest_torchmem.reports.summary import Check
from pytest_torchmem.units import format_size

_OF_A_GPU = re.compile(r"cuda|gpu|nvidia|accelerator", re.IGNORECASE)
NEVER_CHECKED = (
    "never checked, because they are skipped where there is no GPU: run pytest with "
    "--torchmem-fake-cuda=h100, or remove the skipif, since a traced test needs no GPU"
)


SKIPPED = "never checked, because they were skipped"
UNUSED = "passed without a check: nothing in them called torchmem.check"


def why_skipped(item: pytest.Item, call: pytest.CallInfo[None]) -> tuple[str, str] | None:
    """Return why a test was skipped and what is said of all such, ``None`` where it was not.

    Is it for want of a GPU? The reason tells, conditions that are texts, and how marks are written.
    """
    excinfo = call.excinfo
    if excinfo is None:
        return None
    # One that did not run, and none that failed as expected: ``xfail(run=False)``.
    not_run = call.when == "setup" and excinfo.errisinstance(pytest.xfail.Exception)
    if not (not_run or excinfo.errisinstance(pytest.skip.Exception)):
        return None
    reason = str(getattr(excinfo.value, "msg", "") or excinfo.value)
    marks = list(item.iter_markers("skipif"))
    texts = [str(argument) for mark in marks for argument in (*mark.args, *mark.kwargs.values())]
    if marks:  # else a fixture skipped, or the test's module
        texts.append(_decorators(getattr(item, "function", None)))
    is_for_gpu = any(map(_asks_for_gpu, (*texts, reason)))
    return reason, NEVER_CHECKED if is_for_gpu else SKIPPED


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


_ATTACHED: pytest.StashKey[list[dict[str, Any]]] = pytest.StashKey()


def attach(item: pytest.Item, check: Check, properties: Sequence[tuple[str, object]]) -> None:
    """Hand a check to those of the plugins that run."""
    manager = item.config.pluginmanager
    if manager.hasplugin("benchmark"):
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        getattr(benchmark, "extra_info", {}).update(properties)
    title = f"memory: {check.result.key.name or check.device}"
    if manager.hasplugin("allure_listener"):  # with --alluredir alone
        allure: Any = import_module("allure")
        allure.attach(_text(check), title, allure.attachment_type.TEXT)
    if item.config.getoption("htmlpath", None):
        extras: Any = import_module("pytest_html.extras")
        item.stash.setdefault(_ATTACHED, []).append(extras.text(_text(check), title))


def add_attached(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add what was attached in a phase to its report, where pytest-html looks for it."""
    if attached := item.stash.get(_ATTACHED, []):
        report.extras = [*getattr(report, "extras", []), *attached]  # type: ignore[attr-defined]
        attached.clear()


def _text(check: Check) -> str:
    figures = check.result.figures.items()
    lines = [f"{label(name):15} {format_size(size)}" for name, size in figures]
    return "\n".join([check.device, *lines, "", check.message, check.advice]).rstrip() + "\n"
