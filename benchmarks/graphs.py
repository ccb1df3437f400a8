"""What is read from traces of the zoo: node tables and plans.

    python -m benchmarks.graphs                 all models, on fake cpu and fake cuda
    python -m benchmarks.graphs -k 'bert|lstm'  models whose name matches
    python -m benchmarks.graphs --scaling       how they grow with their inputs' first dimension
    python -m benchmarks.graphs --operations    operators whose operations no formula counts
    python -m benchmarks.graphs --compiled      compiled by Inductor, traced and run on this CPU

For each model: whether the totals of the node table are the profile's peaks, by how much the
planned arena is larger than what lives in it at its peak, and how long both took against the trace.
With ``--scaling``: whether the figures at five, six and nine
times the length of the first dimension (the batch, but for recurrent layers) are those that were
predicted from other lengths, and whether a prediction that is wrong says that it may be. With
``--operations``: the operators that are neither pointwise nor views and whose floating-point
operations nothing counts, in how many models, with the share of all bytes that they move. With
``--compiled``: the peak of the last of three steps (forward, backward, ``zero_grad``), traced and
measured, each model in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch.utils._pytree import tree_leaves

import pytest_torchmem as torchmem
from benchmarks.zoo.models import models, samples
from pytest_torchmem.graphs.scaling import resized
from pytest_torchmem.operators.workspace_of import CallWork
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.trees import tensors_in

_PEAKS = ("forward_peak", "backward_peak", "optimizer_peak", "peak")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each model, and what they have in common."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graphs")
    parser.add_argument("-k", dest="pattern", default="")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--operations", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--devices", default="cpu,cuda")
    options = parser.parse_args(arguments)
    if options.one:
        return _compiled_one(options.pattern)
    if options.compiled:
        return _compiled(options.pattern)
    if options.operations:
        return _operations(options.pattern, options.devices.split(","))
    rows: list[tuple[Any, ...]] = []
    for device in options.devices.split(","):
        for model in models(options.pattern):
            sample = next(iter(samples(model)))
            given = {**sample.kwargs, **sample.options, "device": device}
            row = _scaled if options.scaling else _tables
            try:
                found = row(sample.target, sample.args, given)
            except Exception as error:
                reason = str(error).partition("\n")[0][:80]
                print(f"{device} {model.case}: {type(error).__name__}: {reason}", flush=True)
                continue
            rows.append((f"{device} {model.case}", *found))
            print(*rows[-1], flush=True)
    headers: tuple[str, ...] = ("model", "same", "arena", "table", "plan")
    if options.scaling:
        headers = ("model", "same", "told", "fitted to", "doubts")
    print(tabulate(rows, headers))
    print(f"{sum(bool(row[1]) for row in rows)} of {len(rows)} the same")
    if options.scaling:
        print(f"{sum(not row[2] for row in rows)} of {len(rows)} wrong without a doubt")
    if not options.scaling and rows:
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


def _scaled(model: Any, args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    own = {name: value for name, value in options.items() if name not in ("device", "optimizer")}
    others = {name: options[name] for name in ("device", "optimizer")}
    length = next(tensors_in((args, own))).shape[0]

    def build(batch: int) -> tuple[Any, ...]:
        given, named = resized((args, own), {0: (length, batch)})
        return (model, *given, named)

    found = torchmem.scaling(build, batch=[2 * length, 3 * length], options=others)
    same, told = True, True
    doubts: dict[str, None] = {}
    for times in (5, 6, 9):
        target, *given, named = build(times * length)
        figures = torchmem.trace(target, *given, **named, **others).figures()
        predicted = found.predict(batch=times * length)
        right = all(figures.get(name) == bytes_ for name, bytes_ in predicted.items())
        same = same and right
        told = told and (right or not predicted.exact)
        doubts |= dict.fromkeys(predicted.doubts)
    fitted = " ".join(str(one // length) for one in found.sizes["batch"])
    return same, told, fitted, "; ".join(doubts)[:120]


def _operations(pattern: str, devices: Sequence[str]) -> int:
    """Print the operators whose operations no formula counts, those that move most bytes first."""
    moved: Counter[str] = Counter()
    found: dict[str, set[str]] = {}
    for device in devices:
        for model in models(pattern):
            sample = next(iter(samples(model)))
            given = {**sample.kwargs, **sample.options, "device": device}
            for call in torchmem.trace(sample.target, *sample.args, **given).calls or ():
                work = call.work
                nbytes = work.read + work.written
                moved["all"] += nbytes
                if isinstance(work, CallWork) and not work.has_formula:
                    overload = work.spec.overload
                    if torch.Tag.pointwise in overload.tags or not nbytes:
                        continue
                    name = work.spec.name.partition(".")[0]
                    moved[name] += nbytes
                    found.setdefault(name, set()).add(f"{device} {model.case}")
    ordered = sorted(found, key=lambda name: -moved[name])
    rows = [(name, len(found[name]), f"{moved[name] / moved['all']:.3%}") for name in ordered]
    print(tabulate(rows, ("operator", "models", "of the bytes moved")))
    return 0


def _compiled(pattern: str) -> int:
    rows = []
    for model in models(pattern):
        command = [sys.executable, "-m", "benchmarks.graphs", "--one", "-k", f"^{model.case}$"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or ["?"])[-1][:120]
            print(f"{model.case}: {reason}", flush=True)
            continue
        level, eager, traced, measured = json.loads(ended.stdout.splitlines()[-1])
        rows.append((model.case, level, eager, traced, measured, f"{traced / measured - 1:+.3%}"))
        print(*rows[-1], flush=True)
    headers = ("model", "level", "eager", "traced", "measured", "difference")
    print(tabulate(rows, headers, intfmt=","))
    near = sum(abs(traced - measured) <= measured / 100 for *_, traced, measured, _ in rows)
    print(f"{near} of {len(rows)} within 1 % of the measured peak")
    return 0


def _compiled_one(pattern: str) -> int:
    """Print a model's level, and the peaks of its last step: eager, compiled, and measured."""
    [model] = models(pattern)
    next(iter(samples(model)))  # what is imported for it
    runs: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (torchmem.trace, {"host": "here", "mode": "eager"}),
        (torchmem.trace, {"host": "here"}),
        (torchmem.measure, {}),
    )
    found = []
    for profiler, options in runs:
        torch.compiler.reset()
        profile = profiler(partial(_steps, model), **options)
        found.append((profile.level, _last_step(profile)))
    (_, eager), (level, traced), (_, measured) = found
    print(json.dumps([level, eager, traced, measured]))
    return 0


def _steps(model: Any) -> object:
    """Build a model and run three steps of it: the first compiles, and allocates for it."""
    sample = next(iter(samples(model)))
    compiled = torch.compile(sample.target)
    for _ in range(3):
        sample.target.zero_grad()
        _scalar(compiled(*sample.args, **sample.kwargs)).backward()
    return compiled


def _scalar(output: Any) -> Any:
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
    return sum(one.sum() for one in tensors if one.requires_grad)


def _last_step(profile: Any) -> int:
    """Return the peak of the last forward and backward."""
    live = profile.timeline.live_bytes()
    spans = [span for span in profile.timeline.spans() if span[2] is Phase.FORWARD]
    return int(max(live[spans[-1][0] :]))


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


if __name__ == "__main__":
    raise SystemExit(main())
