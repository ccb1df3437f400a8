"""Fetch and run the programs, print what became of them, and write it down.

python -m benchmarks.programs_of_others [--cache DIR] [--sources DIR] [--only WORD ...]
    [--modes cuda cpu pytest] [--jobs 2] [--json FILE] [--trace-options '{"values": "real"}']
"""

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.programs_of_others.classify import Outcome
from benchmarks.programs_of_others.manifest import HERE, read_manifest
from benchmarks.programs_of_others.run import Limits, Settings, Verdict, run_all


def main() -> int:
    """Run what is asked for; return 1 if a program fails badly, crashes or errs."""
    options = _options()
    entries = [
        entry
        for entry in read_manifest()
        if not options.only
        or any(word == entry.group or word in entry.name for word in options.only)
    ]
    settings = Settings(
        cache=options.cache.absolute(),
        mirrors=options.sources,
        modes=tuple(options.modes),
        limits=Limits(seconds=options.seconds),
        trace_options=json.loads(options.trace_options),
        fresh=options.fresh,
    )
    verdicts = run_all(entries, settings, options.jobs, _tell)
    for mode in dict.fromkeys(verdict.mode for verdict in verdicts):
        of_mode = [verdict for verdict in verdicts if verdict.mode == mode]
        print(f"\n{mode}: {len(of_mode)} programs")
        groups: dict[str, Counter[str]] = {}
        for verdict in of_mode:
            groups.setdefault(verdict.group, Counter())[verdict.outcome.value] += 1
        groups["all"] = Counter(verdict.outcome.value for verdict in of_mode)
        for group, counts in groups.items():
            print(f"  {group:16}", ", ".join(f"{n} {name}" for name, n in counts.most_common()))
    if options.json:
        day = {"date": date.today().isoformat()}
        document: dict[str, Any] = {**day, "versions": versions(entries)}
        document["trace_options"] = settings.trace_options
        rows = [{**asdict(verdict), "outcome": verdict.outcome.value} for verdict in verdicts]
        document["programs"] = [{**row, **day} for row in rows]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    bad = {Outcome.FAILS_BADLY, Outcome.CRASH, Outcome.WRONG_BRANCH, Outcome.TOO_LONG}
    return int(any(verdict.outcome in bad for verdict in verdicts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "programs_of_others"
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--sources", type=Path, help="git directories named <owner>/<name>.git")
    parser.add_argument("--only", nargs="*", default=[], help="groups, or parts of names")
    parser.add_argument("--modes", nargs="*", default=["cuda"], choices=["cuda", "cpu", "pytest"])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=Limits.seconds)
    parser.add_argument("--json", type=Path, help=f"such as {HERE.name}/results.json")
    parser.add_argument("--trace-options", default="{}", help="further arguments of trace()")
    parser.add_argument("--fresh", action="store_true", help="make the real runs again")
    return parser.parse_args()


def _tell(verdict: Verdict) -> None:
    first = verdict.error.partition("\n")[0][:150]
    print(
        f"{verdict.outcome.value:14} {verdict.mode:6} {verdict.name:45} "
        f"{verdict.real_seconds:5.1f} {verdict.seconds:5.1f} s  {first}",
        flush=True,
    )


def versions(entries: Sequence[object]) -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "transformers", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
