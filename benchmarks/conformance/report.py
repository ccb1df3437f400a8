"""What a run of the conformance harness found, as JSON and as tables."""

import json
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.comparison import PHASES, Comparison, Status

_COMPARED = (Status.EXACT, Status.CLOSE, Status.DIFFERENT)
REASONS: dict[str, str] = {
    # Values decide.
    "matrix_exp|linalg.matrix_exp": (
        "the norms of the matrices decide how many terms are added up, and of which"
    ),
    # Libraries decide.
    r"nn\.(functional\.conv(_transpose)?|Conv(Transpose)?)[123]d": (
        "oneDNN chooses the blocks of strided and of bfloat16 channels-last kernels by estimates "
        "that are not modelled"
    ),
}
"""Why operators still differ by more than 64 bytes, by a regular expression for the whole name."""


def machine() -> dict[str, str]:
    """Return what the measured figures depend on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


def write(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write every comparison and what the figures depend on."""
    document = {"machine": machine(), "comparisons": [c.as_json() for c in comparisons]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def read(path: Path) -> list[Comparison]:
    """Return the comparisons of a file that ``write`` wrote."""
    document: dict[str, Any] = json.loads(path.read_text())
    return [Comparison.from_json(record) for record in document["comparisons"]]


def operator_of(case: str) -> str:
    """Return the operator's name in a case, or what is before the sample's index."""
    return case.split(":")[1] if ":" in case else case.rpartition("/")[0]


def counts_table(comparisons: Iterable[Comparison]) -> str:
    """Return the counts and shares of each status, by dtype and layout and in total.

    Samples whose real step fails are not part of the total.
    """
    groups: dict[str, Counter[Status]] = defaultdict(Counter)
    for comparison in comparisons:
        suite, _, dtype, layout, variant = comparison.case.rpartition("/")[0].split(":")
        groups[f"{suite} {dtype} {layout} {variant}"][comparison.status] += 1
        groups["total"][comparison.status] += 1
    rows = []
    for name in sorted(groups, key=lambda name: (name == "total", name)):
        counts = groups[name]
        compared = counts.total() - counts[Status.SKIPPED]
        good = counts[Status.EXACT] + counts[Status.CLOSE]
        share = f"{good / compared:.2%}" if compared else "-"
        rows.append((name, *(str(counts[status]) for status in Status), share))
    headers = ("samples", *(status.value for status in Status), "exact or within 64 bytes")
    return tabulate(rows, headers=headers, colalign=("left", *("right",) * (len(headers) - 1)))


def differences_table(comparisons: Iterable[Comparison], rows: int = 0) -> str:
    """Return the operators that differ, by how many of their samples do, with an example each."""
    groups: dict[str, list[Comparison]] = defaultdict(list)
    totals: Counter[str] = Counter()
    for comparison in comparisons:
        operator = operator_of(comparison.case)
        totals[operator] += comparison.status is not Status.SKIPPED
        if comparison.status in (Status.CLOSE, Status.DIFFERENT):
            groups[operator].append(comparison)
    table = []
    for operator, found in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        far = [c for c in found if c.status is Status.DIFFERENT]
        worst = max(found, key=lambda c: max(abs(c.difference(phase) or 0) for phase in PHASES))
        table.append(
            (
                operator,
                f"{len(far)} + {len(found) - len(far)} of {totals[operator]}",
                *(_range(found, phase) for phase in PHASES[:2]),
                worst.case,
            )
        )
    headers = ("operator", "differ + close", "forward bytes", "backward bytes", "worst case")
    return tabulate(table[: rows or None], headers=headers, disable_numparse=True)


def _range(comparisons: Iterable[Comparison], phase: str) -> str:
    differences = [d for c in comparisons if (d := c.difference(phase))]
    if not differences:
        return "0"
    low, high = min(differences), max(differences)
    return f"{low:+,}" if low == high else f"{low:+,} … {high:+,}"


def reasons_table(comparisons: Iterable[Comparison], known: bool) -> str:
    """Return the operators that are beyond 64 bytes or unsupported, with the reason or without.

    ``known`` chooses between those whose reason ``reasons.py`` has and those it does not have.
    """
    far: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for comparison in comparisons:
        operator = operator_of(comparison.case)
        totals[operator] += comparison.status is not Status.SKIPPED
        far[operator] += comparison.status is Status.DIFFERENT
        failed[operator] += comparison.status in (Status.UNSUPPORTED, Status.CRASHED)
    rows = []
    for operator in sorted(totals, key=lambda name: (-far[name] - failed[name], name)):
        known_reasons = (REASONS[name] for name in REASONS if re.fullmatch(name, operator))
        reason = next(known_reasons, None)
        if far[operator] + failed[operator] and (reason is not None) is known:
            counts = far[operator], failed[operator], totals[operator]
            rows.append((operator, *counts, reason or ""))
    headers = ("operator", "different", "unsupported", "of", "reason")
    return tabulate(rows, headers=headers, disable_numparse=True)


def causes_table(comparisons: Iterable[Comparison], rows: int = 0) -> str:
    """Return what is alive at peaks by one way only, by the number of samples it concerns."""
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for comparison in comparisons:
        for cause in comparison.causes:
            phase, size, operators = cause.split(" ", 2)
            groups[f"{phase} {size[0]} {operators}"].append((int(size), comparison.case))
    table = []
    for name, found in sorted(groups.items(), key=lambda item: -len({c for _, c in item[1]})):
        cases = {case for _, case in found}
        sizes = [abs(size) for size, _ in found]
        samples_of = sorted({operator_of(case) for case in cases})
        table.append(
            (len(cases), name, f"{min(sizes):,} … {max(sizes):,}", ", ".join(samples_of)[:100])
        )
    headers = ("samples", "real only (-), traced only (+)", "bytes", "in samples of")
    return tabulate(table[: rows or None], headers=headers, disable_numparse=True)


def errors_table(comparisons: Iterable[Comparison], statuses: Sequence[Status]) -> str:
    """Return the error messages of the given statuses by how often they came."""
    groups: dict[str, list[str]] = defaultdict(list)
    for comparison in comparisons:
        if comparison.status in statuses:
            groups[comparison.error].append(comparison.case)
    rows = [
        (len(cases), ", ".join(sorted({operator_of(case) for case in cases}))[:90], error[:160])
        for error, cases in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    return tabulate(rows, headers=("samples", "operators", "error"), disable_numparse=True)
