"""The process that runs units of samples; it may crash, and its supervisor goes on without it."""

import gc
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.comparison import Comparison, Status, compare, describe
from benchmarks.isolation.sample import NothingToDifferentiate, Sample, Source

Run = Callable[[str, Sample, Callable[[], None]], Comparison]
"""What is done with a sample: a function that another process can import.

Its last argument is to be called when only the trace is left to do.
"""


def work(
    connection: Connection, source: Source, limit: int, threads: int, run: Run | None = None
) -> None:
    """Answer requests ``(unit, first sample's index)`` until ``None`` comes.

    Every sample is announced before it runs (``("begin", case, detail)``), so that the supervisor
    knows which one took the process down, and again (``("measured", case, "")``) before its trace.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    while (request := connection.recv()) is not None:
        unit, first = request
        try:
            made = source(unit, limit)
            # What the samples' modules hold need not be looked through before each measurement.
            gc.collect()
            gc.freeze()
            for sample in made:
                if sample.index < first:
                    continue
                case = f"{unit.case}/{sample.index}"
                connection.send(("begin", case, sample.detail[:400]))
                announce = partial(connection.send, ("measured", case, ""))
                found = (run or run_sample)(case, sample, announce)
                connection.send(("result", found.as_json(), ""))
        except Exception as error:
            case = f"{unit.case}/samples"
            record = Comparison(case, Status.SKIPPED, error=describe(error))
            connection.send(("result", record.as_json(), ""))
        connection.send(("done", unit.case, ""))


def run_sample(case: str, sample: Sample, announce: Callable[[], None] | None = None) -> Comparison:
    """Compare one sample; a difference counts if the measurement says the same twice.

    The first run of a kernel in a process can take memory that it then keeps.
    """
    start = time.perf_counter()
    found = _compare(case, sample, announce)
    if found.status in (Status.CLOSE, Status.DIFFERENT):
        found = _compare(case, sample, announce)
    return replace(found, seconds=round(time.perf_counter() - start, 4))


def _compare(case: str, sample: Sample, announce: Callable[[], None] | None) -> Comparison:
    options: dict[str, Any] = {**sample.options, **sample.kwargs}
    options |= {"detail": sample.detail[:400], "announce": announce}
    torch.manual_seed(0)
    found = compare(case, sample.target, *sample.args, **options)
    if found.status is Status.SKIPPED and found.error.startswith(NothingToDifferentiate.__name__):
        options["backward"] = False
        found = compare(case, sample.target, *sample.args, **options)
    return found
