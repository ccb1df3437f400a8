"""Which tests a process collected, and whether it has seen all of a module.

What was not selected must never look as if it were gone, so a module counts as whole only where
nothing at all took tests away from it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.snapshot.format import Key
from pytest_torchmem.snapshot.location import DIRECTORY, snapshot_path


def test_file(item: pytest.Item) -> pytest.Collector | None:
    """Return the collector of the file that ``item`` is in."""
    files = (node for node in reversed(item.listchain()) if isinstance(node, pytest.File))
    return next(files, None)


def test_id(item: pytest.Item) -> str:
    """Return the id of ``item`` within its file, the whole parameter id included."""
    file = test_file(item)
    return item.nodeid.removeprefix(f"{file.nodeid}::") if file is not None else item.nodeid


@dataclass(slots=True)
class Module:
    """The tests of one module, by their ids within it."""

    nodeid: str
    path: Path
    tests: list[str] = field(default_factory=list)
    whole: bool = True


class Collection:
    """What this process collected, module by module."""

    def __init__(
        self,
        config: pytest.Config,
        reports: Iterable[pytest.CollectReport],
        collected: Iterable[pytest.Item],
        selected: Iterable[pytest.Item],
    ) -> None:
        self._config = config
        self._modules: dict[str, Module] = {}
        self._incomplete: set[str] = set()
        """Collectors that failed or were skipped."""
        for report in reports:
            self._take_report(report)
        self._take_items(collected)
        self._find_whole(selected)

    def _take_report(self, report: pytest.CollectReport) -> None:
        """Take note of a collector; a module may have no tests at all any more."""
        if not report.passed:
            self._incomplete.add(report.nodeid)
        elif report.nodeid.endswith(".py"):
            path = self._config.rootpath / report.nodeid
            self._modules.setdefault(report.nodeid, Module(report.nodeid, path))

    def _take_items(self, items: Iterable[pytest.Item]) -> None:
        """Take note of every test, before any is deselected."""
        for item in items:
            parent = test_file(item)
            if parent is None:
                continue
            module = self._modules.setdefault(parent.nodeid, Module(parent.nodeid, item.path))
            module.path = item.path
            module.tests.append(test_id(item))

    def _find_whole(self, items: Iterable[pytest.Item]) -> None:
        """Take note of what is left to run, and tell which modules are whole."""
        left = Counter(item.nodeid for item in items)
        parts, unclear = self._named_parts()
        # --lf hides tests while a module is collected, so nothing says that they are there.
        hidden = unclear or bool(self._config.getoption("lf", False))
        for module in self._modules.values():
            ids = Counter(f"{module.nodeid}::{test}" for test in module.tests)
            module.whole = not (
                hidden
                or any(left[nodeid] < count for nodeid, count in ids.items())
                or os.path.realpath(module.path) in parts
                or any(self._inside(nodeid, module.nodeid) for nodeid in self._incomplete)
            )

    def ambiguous(self, item: pytest.Item) -> set[str]:
        """Return the ids that several tests of ``item``'s module share."""
        parent = test_file(item)
        module = self._modules.get(parent.nodeid) if parent is not None else None
        if module is None:
            return set()
        if self._config.getoption("keepduplicates", False):
            return set()
        return {test for test, count in Counter(module.tests).items() if count > 1}

    def gone(self, item: pytest.Item, keys: Iterable[Key]) -> list[Key]:
        """Return those of ``keys`` whose test the module of ``item`` does not have any more."""
        parent = test_file(item)
        module = self._modules.get(parent.nodeid) if parent is not None else None
        if module is None or not module.whole:
            return []
        tests = set(module.tests)
        return [key for key in keys if key.test not in tests]

    def to_plain(self) -> list[dict[str, Any]]:
        """Return the modules that have a snapshot file, of builtin types."""
        directories: dict[Path, bool] = {}
        plain = []
        for module in self._modules.values():
            parent = module.path.parent
            if parent not in directories:
                directories[parent] = (parent / DIRECTORY).is_dir()
            file = snapshot_path(module.path)
            if directories[parent] and file.exists():
                plain.append(
                    {
                        "nodeid": module.nodeid,
                        "file": Path(os.path.relpath(file, self._config.rootpath)).as_posix(),
                        "tests": module.tests,
                        "whole": module.whole,
                    }
                )
        return plain

    def _named_parts(self) -> tuple[set[str], bool]:
        """Return the files of which the command line names single tests, and whether it is unclear.

        Unclear is a name such as ``package.module::test`` (``--pyargs``), which is no path.
        """
        files, unclear = set(), False
        for argument in self._config.args:
            name, parts, _ = str(argument).partition("::")
            if not parts:
                continue
            path = Path(self._config.invocation_params.dir, name)
            files.add(os.path.realpath(path))
            unclear = unclear or not path.exists()
        return files, unclear

    @staticmethod
    def _inside(nodeid: str, module: str) -> bool:
        """Tell whether a collector is ``module``, or above or below it."""
        return (
            nodeid in ("", ".", module)
            or nodeid.startswith(f"{module}::")
            or module.startswith(f"{nodeid}/")
        )
