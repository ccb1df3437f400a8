"""A page for browsers: one file that needs no network.

The chart is drawn by uPlot (https://github.com/leeoniya/uPlot, MIT), which is in the page.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import nlargest
from html import escape
from importlib.resources import files
from typing import Any

from pytest_torchmem.figures import PEAK
from pytest_torchmem.printable import printable
from pytest_torchmem.profile import facts, node_table, sampled, tables
from pytest_torchmem.profile.formats import exports, saved
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.static_plan import Placed, StaticPlan
from pytest_torchmem.profile.timeline import Allocation, Timeline, phases
from pytest_torchmem.units import format_size

SAMPLES = 1200
_GROUPS = 10
_ROWS = 1500
"""Groups of allocations that are told apart in the list of what is alive, the largest ones."""
_BYTES = 1_200_000
"""The most that the changes of that list may take in the page."""
_FOLDED = 1 / 2000
"""The part of the peak below which branches of the flame graph are left out."""
_STORAGES = 1500
"""Storages of a plan that are drawn, those with the most bytes and the longest lives."""
_OPERATORS = 250
"""Rows of the table of operators, those with the most bytes."""
_COLUMNS = (
    *("module", "operator", "line", "calls", "fwd_in", "fwd_saved", "fwd_tmp", "fwd_out"),
    *("fwd_peak", "bwd_tmp", "bwd_out", "bwd_peak", "fwd_flops", "bwd_flops"),
)

_PLACE = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Content:
    """What a page is about: ``lines`` stand under the title, ``notes`` below the chart."""

    title: str
    timeline: Timeline
    figures: Mapping[str, int]
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()
    before: Mapping[str, int] | None = None
    """The figures of a snapshot, where there is one, to be shown beside those of today."""
    before_outline: facts.Outline = ()
    """The course of what the step was compared with, to be drawn beside it."""
    message: str = ""
    """What a failing check says."""
    layout: exports.Layout | None = None
    """Where the caching allocator puts the storages of the step."""
    plan: StaticPlan | None = None
    table: node_table.NodeTable | None = None
    """What each operator needs."""


def page(content: Content) -> str:
    data = json.dumps(saved.escaped(page_data(content)), separators=(",", ":"), ensure_ascii=False)
    parts = {
        "title": escape(printable(content.title)),
        "styles": _asset("uPlot.min.css") + _asset("page.css"),
        "license": _asset("uPlot.LICENSE"),
        "chart": _asset("uPlot.iife.min.js"),
        "script": _asset("page.js"),
        # No "<" of a name may end the script element that holds the data.
        "data": data.replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    }
    pieces = _PLACE.split(_asset("page.html"))
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def page_data(content: Content) -> dict[str, Any]:
    timeline = content.timeline
    positions, alike = sampled.samples(timeline, SAMPLES), sampled.Alike(timeline)
    live = timeline.live()
    peak = live.index(max(live))
    depth = sampled.module_depth(alike.distinct, 2 * _GROUPS)
    return {
        "title": content.title,
        "lines": content.lines,
        "notes": content.notes,
        "message": content.message,
        "figures": dict(content.figures),
        "before": dict(content.before) if content.before is not None else None,
        "events": len(timeline.events),
        "positions": positions,
        "totals": [live[position] for position in positions],
        "earlier": _earlier(content, positions),
        "peak": {"position": peak, "nbytes": live[peak]},
        "phases": [[start, stop, phase.value] for start, stop, phase in phases(timeline)],
        "stacks": {
            name: asdict(sampled.stacked(alike, positions, key, _GROUPS))
            for name, key in (
                ("kind", sampled.by_kind),
                ("module", sampled.by_module_of(depth)),
                ("operator", sampled.by_operator),
            )
        },
        **_alive(alike, positions),
        "flame": flame(timeline.live_at(peak)),
        "segments": _segments(content.layout) if content.layout is not None else None,
        "plan": _plan(content.plan) if content.plan and content.plan.storages else None,
        "operators": _operators(content.table) if content.table is not None else None,
    }


def _segments(laid: exports.Layout) -> dict[str, Any]:
    unused = format_size(laid.reserved - laid.allocated)
    said = f"{format_size(laid.reserved)} reserved, of which at least {unused} were never in use"
    return _arena(laid.blocks, laid.reserved, laid.allocated, said, laid.segments)


def _plan(plan: StaticPlan) -> dict[str, Any]:
    said = f"arena {format_size(plan.arena)} ({plan.strategy})"
    said += f"; outside of it {format_size(plan.outside)}"
    if plan.reserved_peak is not None:
        said += f"; the allocator reserves {format_size(plan.reserved_peak)} for both"
    return _arena(plan.storages, plan.arena, plan.live_peak, said)


def _arena(
    storages: Sequence[Placed],
    arena: int,
    live: int,
    said: str,
    segments: Sequence[tuple[int, int, int]] = (),
) -> dict[str, Any]:
    """Return the places of storages: offset, bytes, start, stop, and what each is."""
    largest = nlargest(_STORAGES, storages, key=lambda one: one.nbytes * (one.stop - one.start))
    names: dict[tuple[str, ...], int] = {}
    boxes = [
        [
            *(one.offset, one.nbytes, one.start, one.stop),
            names.setdefault(_group(one.allocation), len(names)),
        ]
        for one in largest
    ]
    return {
        "said": said,
        "arena": arena,
        "live": live,
        "segments": segments,
        "boxes": boxes,
        "names": list(map(list, names)),
        "storages": len(storages),
    }


def _operators(table: node_table.NodeTable) -> dict[str, Any]:
    folded = table.folded()
    kept = folded.largest(_OPERATORS)
    rows = [[getattr(row, name) for name in _COLUMNS] for row in kept]
    return {"columns": list(_COLUMNS), "rows": rows, "all": len(folded.largest())}


def _earlier(content: Content, positions: Sequence[int]) -> list[int] | None:
    """Return the bytes alive in what the step is compared with, at positions of its own."""
    peak = (content.before or {}).get(PEAK)
    if not content.before_outline or peak is None:
        return None
    return facts.bytes_along(content.before_outline, peak, content.timeline, positions)


def _alive(alike: sampled.Alike, positions: Sequence[int]) -> dict[str, Any]:
    """Return groups of allocations, and by how much each changes from sample to sample."""
    names: dict[tuple[str, ...], int] = {}
    group_of = [names.setdefault(_group(found), len(names)) for found in alike.distinct]
    sizes = [found.nbytes for found in alike.distinct]
    largest = Counter[int]()
    for number, (group, nbytes) in enumerate(zip(group_of, sizes, strict=True), start=1):
        largest[group] += alike.counts[number] * nbytes
    for most in (_ROWS, _ROWS // 4, _ROWS // 16, _ROWS // 64):
        kept = {group: place for place, (group, _) in enumerate(largest.most_common(most))}
        places = [kept.get(group, len(kept)) for group in group_of]
        changes = [_changes(made, places, sizes) for made in alike.changes(positions)]
        if len(json.dumps(changes)) <= _BYTES:
            break
    by_number = {number: name for name, number in names.items()}
    rows = [list(by_number[number]) for number in kept]
    return {"groups": [*rows, [sampled.OTHER, "", "", "", ""]], "changes": changes}


def _group(found: Allocation) -> tuple[str, ...]:
    """Return what an allocation is told by; what is alike in the layers of a model is the same."""
    name = " ".join(part for part in (fold(found.label)[0], found.tensor) if part)
    origin = found.origin
    return (tables.describe_kind(found), fold(origin.module)[0], origin.operator, name, origin.line)


def _changes(made: Counter[int], places: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return group, count and bytes, over and over, of what changed before a sample."""
    counts: dict[int, list[int]] = {}
    for number, many in made.items():
        count = many if number > 0 else -many
        change = counts.setdefault(places[abs(number) - 1], [0, 0])
        change[0] += count
        change[1] += count * sizes[abs(number) - 1]
    return [number for key, change in counts.items() if any(change) for number in (key, *change)]


def flame(allocations: Sequence[Allocation]) -> dict[str, Any]:
    """Return the bytes of allocations as a tree: modules by their path, then operators.

    A node has a name ``n``, bytes ``b`` and children ``c``, the largest first.
    """
    total = sum(found.nbytes for found in allocations)
    root: dict[str, Any] = {"n": "all", "b": total, "c": {}}
    for found in allocations:
        origin = found.origin
        path = [part for part in origin.module.split(".") if part]
        leaf = origin.operator or found.label.rpartition(".")[2] or f"({found.kind.value})"
        node = root
        for part in (*path, leaf):
            node = node["c"].setdefault(part, {"n": part, "b": 0, "c": {}})
            node["b"] += found.nbytes
    return _sorted(root, total * _FOLDED)


def _sorted(node: dict[str, Any], least: float) -> dict[str, Any]:
    children = sorted(node["c"].values(), key=lambda child: -child["b"])
    kept = [_sorted(child, least) for child in children if child["b"] >= least]
    return {"n": node["n"], "b": node["b"], "c": kept}


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
