"""What options, ini keys, the environment and markers say, as it is read."""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodes import Node

from pytest_torchmem.checks import (
    DEFAULT_DEVICES,
    DEFAULT_GPU,
    DEFAULT_MEASURE_TOLERANCE,
    GITHUB_MODES,
    MARKER,
    MEASURE_MODES,
    SELECTED_BY,
    STAND_IN,
    UPDATE_MODES,
    VALUES_MODES,
)
from pytest_torchmem.checks.request import (
    Budget,
    Settings,
    parse_choice,
    parse_devices,
    read_budget,
)
from pytest_torchmem.errors import UsageError
from pytest_torchmem.plugin.start import written_early
from pytest_torchmem.snapshots.location import PROPOSAL, relative
from pytest_torchmem.snapshots.tolerance import (
    for_path,
    parse_budget_lines,
    parse_rule_lines,
    parse_rules,
    tolerance_in,
)
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.targets.world import check_ranks, check_world_size


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of a run; raises ``pytest.UsageError`` for what cannot be understood."""
    try:
        return _read(config)
    except UsageError as error:
        raise pytest.UsageError(f"torchmem: {error}") from None


def _read(config: pytest.Config) -> Settings:
    option, ini = config.getoption, config.getini

    def not_empty(name: str) -> Any:
        given = option(f"torchmem_{name}")
        if isinstance(given, str) and not given.strip():
            why = "has an empty value. Is a variable not set? Else leave it out"
            raise UsageError(f"--torchmem-{name.replace('_', '-')} {why}")
        return given

    def value(name: str, default: str = "") -> str:
        """Return the option or, where it is not given, the ini key, or the default."""
        given = not_empty(name)
        return str(ini(f"torchmem_{name}") or default) if given is None else str(given or default)

    def flag(name: str) -> bool:
        return bool(option(f"torchmem_{name}") or ini(f"torchmem_{name}"))

    def path(name: str) -> Path | None:
        """Return a path: relative to where pytest was started, or, from the ini file, the root."""
        given, written = not_empty(name), ini(f"torchmem_{name}")
        if given:
            return Path(config.invocation_params.dir, given)
        return Path(config.rootpath, written) if written else None

    dry_run = bool(option("torchmem_dry_run"))
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
    proposal = path("proposal")
    if proposal is None and in_ci:
        proposal = config.rootpath / PROPOSAL
    fake_cuda = find_gpu(value("fake_cuda")).name if value("fake_cuda") else ""
    # Everything in the suite sees a GPU, and so names it: on the CPU it would not run.
    devices = "cuda" if fake_cuda else DEFAULT_DEVICES
    world_size, written = None, value("world_size")
    if written:
        given = int(written) if written.isdecimal() else written
        world_size = check_world_size(given, "torchmem_world_size")
    if allocator := value("allocator"):
        from pytest_torchmem.allocator.device_memory import parse_options

        parse_options(allocator)
    apart, most = value("measure_tolerance", DEFAULT_MEASURE_TOLERANCE), value("update_max")
    when = parse_choice(value("github", GITHUB_MODES[0]), "torchmem_github", GITHUB_MODES)
    is_on_github = when == "auto" and os.environ.get("GITHUB_ACTIONS") == "true"
    return Settings(
        devices=parse_devices(value("devices", devices), "torchmem_devices"),
        gpu=find_gpu(value("gpu", DEFAULT_GPU)).name,
        gpu_named=bool(value("gpu")),
        allocator=allocator,
        values=parse_choice(value("values", VALUES_MODES[0]), "torchmem_values", VALUES_MODES),
        narrowed=any(option(f"torchmem_{name}") for name in ("devices", "gpu", "fake_cuda")),
        measure=_measure(value("measure"), fake_cuda),
        measure_tolerance=tolerance_in(apart, "torchmem_measure_tolerance"),
        option_tolerance=parse_rules(option("torchmem_tolerance"), "--torchmem-tolerance"),
        ini_tolerance=parse_rule_lines(ini("torchmem_tolerance") or "", "ini torchmem_tolerance"),
        budget=parse_budget_lines(value("budget"), "torchmem_budget"),
        update=_update_modes(option("torchmem_update"), dry_run, in_ci),
        update_max=tolerance_in(most, "torchmem_update_max") if most else None,
        dry_run=dry_run,
        strict=flag("strict"),
        disabled=bool(option("torchmem_disable")),
        split_by_torch=flag("split_by_torch"),
        in_ci=in_ci,
        on_github=is_on_github or when == "always",
        json_path=path("json"),
        markdown_path=path("markdown"),
        html_path=path("html"),
        proposal_path=proposal,
        fake_cuda=fake_cuda,
        world_size=world_size,
        ranks=_ranks(value("ranks"), world_size),
        verbose=config.get_verbosity(SELECTED_BY) > 0,
    )


def _ranks(written: str, world_size: int | None) -> tuple[int, ...]:
    """Return the ranks that are asked for; those of checks with other worlds are checked there."""
    names = written.replace(",", " ").split()
    if not all(name.isdecimal() for name in names):
        raise UsageError(f"torchmem_ranks: {written!r}: write ranks, such as 0,7")
    ranks = tuple(map(int, names))
    return check_ranks(ranks, world_size, "torchmem_ranks") if ranks and world_size else ranks


def _measure(when: str, fake_cuda: str) -> str:
    if fake_cuda and when in ("require", STAND_IN):
        raise UsageError(
            f"torchmem_measure: {when} needs torch's own CUDA code, and torchmem_fake_cuda puts a "
            "fake GPU in its place: leave out one of them"
        )
    when = parse_choice(when or MEASURE_MODES[0], "torchmem_measure", (*MEASURE_MODES, STAND_IN))
    return "never" if fake_cuda else when


def _update_modes(asked: list[str] | None, dry_run: bool, in_ci: bool) -> frozenset[str]:
    asked = asked or (["all"] if dry_run else [])
    if asked and in_ci and not dry_run:
        raise UsageError(
            "the environment variable CI is set, and CI never writes snapshots. Update them on "
            "your machine and commit the files (or unset CI)"
        )
    return frozenset(UPDATE_MODES if "all" in asked else asked)


def budget_of(item: pytest.Item) -> Budget:
    """Return what the markers of a test say; raises ``UsageError`` where they cannot be read."""
    nodes = reversed(item.listchain())
    levels = (level for node in nodes for level in _levels(node))
    marks = ([(mark.args, mark.kwargs) for mark in level] for level in levels)
    rules = parse_budget_lines(written_early(item.config, "torchmem_budget"), "torchmem_budget")
    return read_budget(marks, for_path(rules, relative(item.path, item.config.rootpath)))


def refuse_unreadable(report: pytest.CollectReport) -> None:
    """Let the collection of tests fail where markers of theirs cannot be read."""
    wrong: dict[str, None] = {}
    for item in (one for one in report.result if isinstance(one, pytest.Item)):
        try:
            budget_of(item)
        except UsageError as error:
            path, line, name = item.location
            wrong[f"{path}:{(line or 0) + 1}: {name.partition('[')[0]}: {error}"] = None
    if wrong:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(wrong), []


def _levels(node: "Node") -> Iterator[list[pytest.Mark]]:
    """Yield the markers of a node by the places where they are written, the closest first.

    Those of a set of parameters come before the function's, and a class's before its bases', which
    ``iter_markers`` has the other way round (_pytest/python.py, ``Function``;
    _pytest/mark/structures.py, ``get_unpacked_marks``). What a plugin adds stands by itself.
    """
    own = [mark for mark in node.own_markers if mark.name == MARKER]
    if len(own) < 2:
        yield from ([mark] for mark in own)
        return
    places = [[mark for mark in own if id(mark) in place] for place in _places(node)]
    written = {id(mark) for place in places for mark in place}
    first = next((n for n, mark in enumerate(own) if id(mark) in written), len(own))
    added = [(n, [mark]) for n, mark in enumerate(own) if id(mark) not in written]
    yield from (level for n, level in added if n < first)
    yield from filter(None, places)
    yield from (level for n, level in added if n > first)


def _places(node: "Node") -> Iterator[set[int]]:
    """Yield the ``id`` of every marker at each place of a node."""
    call = getattr(node, "callspec", None)
    if call is not None:
        yield set(map(id, call.marks))
    owner = getattr(node, "obj", None)
    for one in owner.__mro__ if inspect.isclass(owner) else [owner]:
        found: Any = getattr(one, "__dict__", {}).get("pytestmark")
        if not inspect.isclass(one):
            found = getattr(one, "pytestmark", None)
        several = found if isinstance(found, list) else [found]
        yield {id(getattr(mark, "mark", mark)) for mark in several if mark is not None}
