"""Which tests a process collected, and whether it has seen all of a module.

What was not selected must never look as if it were gone, so a module counts as whole only where
nothing at all took tests away from it.
"""

import inspect
import os
from collections import Counter
from collections.abc import Collection as Container
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.plugin.start import SeenFile, checks_memory, node_id
from pytest_torchmem.snapshots import location
from pytest_torchmem.snapshots.store import tests_named_in


def test_file(item: pytest.Item) -> pytest.Collector | None:
    """Return the collector of the file that ``item`` is in."""
    files = (node for node in reversed(item.listchain()) if isinstance(node, pytest.File))
    return next(files, None)


def test_id(item: pytest.Item) -> str:
    """Return the id of ``item`` within its file, the whole parameter id included."""
    file, node = test_file(item), node_id(item)
    return node.removeprefix(f"{file.nodeid}::") if file is not None else node


def is_gone(
    test: str, collected: Container[str], members: Container[str] | None, *, whole: bool
) -> bool:
    """Tell whether it is certain that a module has no such test.

    ``members`` are the names of its functions and classes: where only a part of the module was
    asked for they still say what is not there.
    """
    if test in collected:
        return False
    if whole:
        return True
    if members is None or test in members:
        return False
    return not any(test.startswith(f"{name}::") for name in members)


@dataclass(slots=True)
class Module:
    """The tests of one module, by their ids within it."""

    nodeid: str
    path: Path
    tests: list[str] = field(default_factory=list)
    """The tests that were collected, before any was deselected."""
    whole: bool = True
    """Nothing at all took tests away."""
    named: bool = False
    """Single tests of it were asked for, and only those were collected."""
    deselected: bool = False
    """Some of its memory tests were collected and are not to run."""
    members: dict[str, pytest.Item | pytest.Collector] | None = None
    """The functions and classes in it, by name, also those that were not asked for."""
    memory_tests: set[str] = field(default_factory=set)
    namespace: Any = None
    states: list[str] = field(default_factory=list)
    """It and its snapshots, as they were when it was collected."""

    def all_memory_tests(self) -> list[str] | None:
        """Return every test that checks memory, ``None`` where some may not be known."""
        if not self.named:
            return sorted(self.memory_tests)
        if self.members is None or not all(
            isinstance(node, pytest.Item) for node in self.members.values()
        ):
            return None
        return sorted(name for name, node in self.members.items() if checks_memory(node))

    def hidden(self) -> list[str]:
        """Return the tests with an entry whose function is there and was not collected.

        Plugins and settings (``python_functions``) can hide it from pytest.
        """
        collected = {test.partition("[")[0] for test in self.tests}
        return [
            test
            for test in tests_named_in(location.snapshot_path(self.path))
            if (function := test.partition("[")[0]) not in collected
            and _defines(self.namespace, function.split("::"))
        ]


def _memory_tests(modules: Iterable[Module]) -> list[str]:
    return [f"{one.nodeid}::{test}" for one in modules for test in sorted(one.memory_tests)]


def _has_file(module: Path) -> bool:
    # Path.exists raises where a name is too long.
    return os.path.exists(location.snapshot_path(module))


def _defines(namespace: Any, names: Sequence[str]) -> bool:
    for name in names:
        namespace = inspect.getattr_static(namespace, name, None)
    return callable(namespace) or isinstance(namespace, staticmethod | classmethod)


class Collection:
    """What this process collected, module by module."""

    def __init__(
        self,
        config: pytest.Config,
        reports: Iterable[pytest.CollectReport],
        seen: Mapping[str, SeenFile],
        collected: Iterable[pytest.Item],
        selected: Iterable[pytest.Item],
        proposal: Path | None = None,
    ) -> None:
        self._config = config
        self._proposal = None if proposal is None else Path(os.path.realpath(proposal))
        self._modules: dict[str, Module] = {}
        self._directories: dict[str, Path] = {}
        self._incomplete: set[str] = set()
        """Collectors that failed or were skipped."""
        self._selected: dict[str, str] = {}
        """The tests left to run: their node ids as in reports, and as they were."""
        # --lf hides tests while a module is collected, so nothing says that they are there.
        self._hidden = bool(config.getoption("lf", False))
        for report in reports:
            self._take_report(report)
        for item in collected:
            parent = test_file(item)
            if parent is None:
                continue
            module = self._modules.setdefault(parent.nodeid, Module(parent.nodeid, item.path))
            module.path = item.path
            module.tests.append(test_id(item))
            if checks_memory(item):
                module.memory_tests.add(test_id(item))
        for module in self._modules.values():
            if module.nodeid in seen:
                file = seen[module.nodeid]
                module.states, module.namespace = file.states, getattr(file.collector, "obj", None)
                if not self._hidden:
                    module.members = {node.name: node for node in file.members}
        self._find_whole(list(selected))
        self._selective = self._hidden or any(
            module.named or module.deselected for module in self._modules.values()
        )
        """Memory tests were taken away, and an entry's may be among them under another name."""

    def _take_report(self, report: pytest.CollectReport) -> None:
        """Take note of a collector; a module may have no tests at all any more."""
        path = self._config.rootpath / report.nodeid
        if not report.passed:
            self._incomplete.add(report.nodeid)
        elif report.nodeid.endswith(".py"):
            self._modules.setdefault(report.nodeid, Module(report.nodeid, path))
        elif "::" not in report.nodeid:
            real = Path(os.path.realpath(path))
            proposed = self._proposal is not None and self._proposal in (real, *real.parents)
            proposed = proposed or location.is_proposal(path, self._config.rootpath)
            if report.nodeid and os.path.isdir(path) and not proposed:
                self._directories[report.nodeid] = path

    def _find_whole(self, items: Sequence[pytest.Item]) -> None:
        """Take note of what is left to run, and tell which modules are whole."""
        self._selected = {item.nodeid: node_id(item) for item in items}
        left = Counter(map(node_id, items))
        # The files of which the command line names single tests. A name such as
        # ``package.module::test`` (``--pyargs``) is no path, and makes that unclear.
        named = [argument.partition("::")[::2] for argument in map(str, self._config.args)]
        there = self._config.invocation_params.dir
        paths = [os.path.join(there, name) for name, parts in named if parts]
        files = {os.path.realpath(path) for path in paths}
        unclear = not all(map(os.path.exists, paths))
        for module in self._modules.values():
            ids = Counter(f"{module.nodeid}::{test}" for test in module.tests)
            module.named = unclear or os.path.realpath(module.path) in files
            fewer = {nodeid for nodeid, count in ids.items() if left[nodeid] < count}
            module.deselected = any(f"{module.nodeid}::{t}" in fewer for t in module.memory_tests)
            module.whole = not (
                self._hidden
                or module.named
                or fewer
                or any(self._touches(nodeid, module.nodeid) for nodeid in self._incomplete)
            )

    def ambiguous(self, item: pytest.Item) -> set[str]:
        """Return the ids that several tests of ``item``'s module share."""
        module = self._module_of(item)
        if module is None or self._config.getoption("keepduplicates", False):
            return set()
        return {test for test, count in Counter(module.tests).items() if count > 1}

    def is_gone(self, item: pytest.Item, test: str) -> bool:
        """Tell whether the module of ``item`` certainly does not have ``test`` any more."""
        module = self._module_of(item)
        return module is not None and is_gone(
            test, module.tests, module.members, whole=module.whole
        )

    def _module_of(self, item: pytest.Item) -> Module | None:
        parent = test_file(item)
        return self._modules.get(parent.nodeid) if parent is not None else None

    def to_plain(self) -> dict[str, list[Any]]:
        """Return what there is of snapshots, of builtin types.

        ``modules`` are those that have a snapshot file; they are ``selective`` where the run takes
        memory tests away, of any module: an entry's may be among them. Of directories that were
        collected whole, ``orphans`` are the snapshot files, relative to the root, of modules that
        do not exist any more, and ``calibrations`` the calibration files, each with the ids of the
        directory's memory tests. ``unwritten`` are the memory tests of modules without a snapshot
        file, and such modules that could not be collected. ``selected`` are the node ids of tests
        to run, as reports have them, each with what it is called here: of all where there are
        orphans.
        """
        orphans = [self._relative(file) for file in self.orphans()]
        modules = [
            {
                "nodeid": module.nodeid,
                "file": self._relative(location.snapshot_path(module.path)),
                "tests": module.tests,
                "whole": module.whole,
                "selective": self._selective,
                "members": None if module.members is None else list(module.members),
                "memory_tests": module.all_memory_tests(),
                "hidden": module.hidden() if module.whole else [],
                "path": self._relative(module.path),
                "states": module.states,
            }
            for module in self._modules.values()
            if _has_file(module.path)
        ]
        return {
            "modules": modules,
            "orphans": orphans,
            "unwritten": self._unwritten() if orphans or modules else [],
            "selected": [pair for pair in self._selected.items() if orphans or pair[0] != pair[1]],
            "calibrations": [
                [self._relative(file), _memory_tests(self._modules_in(path))]
                for path in self._whole_directories()
                if os.path.exists(file := path / location.DIRECTORY / location.CALIBRATION)
            ],
        }

    def orphans(self) -> list[Path]:
        """Return the snapshot files of modules that are gone, where that is certain."""
        ours = {location.snapshot_path(module.path) for module in self._modules.values()}
        return [
            file
            for path in self._whole_directories()
            for file in location.orphans_in(path)
            if file not in ours  # a module may go while its tests run
        ]

    def _whole_directories(self) -> list[Path]:
        option = self._config.getoption
        if self._hidden or option("ignore", None) or option("ignore_glob", None):
            return []
        asked = [Path(self._config.invocation_params.dir, str(a)) for a in self._config.args]
        roots = [Path(os.path.realpath(path)) for path in asked if os.path.isdir(path)]
        patterns = self._config.getini("python_files")
        found = []
        for nodeid, directory in self._directories.items():
            real = Path(os.path.realpath(directory))
            inside = self._modules_in(directory)
            whole = (
                any(root == real or root in real.parents for root in roots)
                # Where there are no tests, none that was taken away can be seen.
                and all(module.whole for module in inside or self._modules.values())
                and not any(self._touches(other, nodeid) for other in self._incomplete)
                # Nothing hides files that pytest takes for test modules.
                and {
                    path.name
                    for path in directory.glob("*.py")
                    if path.name != "__init__.py" and any(map(path.match, patterns))
                }
                <= {module.path.name for module in inside}
            )
            if whole:
                found.append(directory)
        return found

    def _unwritten(self) -> list[str]:
        modules = [m for m in self._modules.values() if not _has_file(m.path)]
        root = self._config.rootpath
        others = [n for n in self._incomplete if n.endswith(".py") and "::" not in n]
        return _memory_tests(modules) + [n for n in sorted(others) if not _has_file(root / n)]

    def _modules_in(self, directory: Path) -> list[Module]:
        return [module for module in self._modules.values() if module.path.parent == directory]

    def _relative(self, path: Path) -> str:
        return location.relative(path, self._config.rootpath)

    @staticmethod
    def _touches(nodeid: str, other: str) -> bool:
        """Tell whether a collector is the module or directory ``other``, or above or below it."""
        return (
            other == "."
            or nodeid in ("", ".", other)
            or nodeid.startswith((f"{other}/", f"{other}::"))
            or other.startswith(f"{nodeid}/")
        )
