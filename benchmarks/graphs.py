"""What is read from traces of the zoo: node tables, plans, and the lifetimes of graphs.

    python -m benchmarks.graphs                 all models, on fake cpu and fake cuda
    python -m benchmarks.graphs -k 'bert|lstm'  models whose name matches
    python -m benchmarks.graphs --aot           their graphs of AOTAutograd, read and run

For each model: whether the totals of the node table are the profile's peaks, by how much the
planned arena is larger than what lives in it at its peak, and how long both took against the trace.
With ``--aot``: whether the peak and the end that are read from the graphs are those of the graphs
run on the ledger, tensors alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks.zoo.models import models, samples
from tests.graphs.test_ahead_of_time import live_tensors, run

_PEAKS = ("forward_peak", "backward_peak", "optimizer_peak", "peak")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model, and what they have in common."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs")
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--aot", action="store_true")
    parser.add_argument("--devices", default="cpu,cuda")
    options = parser.parse_args(arguments)
    rows: list[tuple[Any, ...]] = []
    for device in options.devices.split(","):
        for model in models(options.pattern):
            sample = next(iter(samples(model)))
            given = {**sample.kwargs, **sample.options, "device": device}
            row = _graphs if options.aot else _tables
            try:
                found = row(sample.target, sample.args, given)
            except Exception as error:
                reason = str(error).partition("\n")[0][:80]
                print(f"{device} {model.name}: {type(error).__name__}: {reason}", flush=True)
                continue
            rows.append((f"{device} {model.name}", *found))
    headers = ("model", "same") if options.aot else ("model", "same", "arena", "table", "plan")
    print(tabulate(rows, headers))
    print(f"{sum(bool(row[1]) for row in rows)} of {len(rows)} the same")
    if not options.aot and rows:
        tight = sum(row[2] <= 0.05 for row in rows)
        print(f"{tight} of {len(rows)} arenas within 5 % of what lives in them")
    return 0


def _tables(model: Any, args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    seconds, profile = _timed(lambda: torchmem.trace(model, *args, **options))
    for_table, table = _timed(profile.node_table)
    for_plan, plan = _timed(profile.plan)
    figures, peaks = profile.figures(), table.peaks()
    same = all(figures[name] == peaks.get(name) for name in _PEAKS if name in figures)
    return same, plan.overhead, for_table / seconds, for_plan / seconds


def _graphs(model: Any, args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    graphs = torchmem.trace(model, *args, mode="aot", **options).graphs
    read = torchmem.graph_profile(*graphs[:2])
    live = live_tensors(torchmem.trace(run, *graphs[:2]))
    return (read.peak == max(live) and read.end == live[-1],)


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


if __name__ == "__main__":
    raise SystemExit(main())
