"""Checks in the reports of other plugins of pytest: pytest-benchmark, pytest-html and Allure."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from pytest_torchmem.figures import label
from pytest_torchmem.reports.summary import Check
from pytest_torchmem.units import format_size

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
