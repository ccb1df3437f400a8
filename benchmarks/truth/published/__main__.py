"""Hold the allocator's replay and traces against recordings of real GPUs that others published.

python -m benchmarks.truth.published DIR --download       fetch what is not in DIR (110 MB), compare
python -m benchmarks.truth.published DIR                  compare what is there
python -m benchmarks.truth.published DIR --replay         the allocator's replay alone
python -m benchmarks.truth.published DIR --only Wedson    sources whose name matches

1. Every recorded history goes through the replay of the caching allocator, event by event: each
   request's address, each segment's size, what is given back when the cache is emptied, and every
   block at the end have to be the recorded ones.
2. The programs of some recordings are written out and traced: the requests in their order, the peak
   of what was requested, and the bytes that the process reserved.
3. Steps of ResNet-50 in the samples of pytorch/kineto, by operator.

An error is traced minus recorded, of what was recorded.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import command
from benchmarks.truth.published.kineto import compare_step, read_step, resnet50_training
from benchmarks.truth.published.replaying import Outcome, replay
from benchmarks.truth.published.snapshots import SnapshotError, histories
from benchmarks.truth.published.sources import Source, SourceError, sources
from benchmarks.truth.published.traced import PARTS, PROGRAMS, compare

Replayed = tuple[Source, Outcome, Outcome]
"""A source, and the outcomes of one of its histories with recorded and with own addresses."""


def replay_table(found: Sequence[Replayed]) -> str:
    """Return what was replayed, by repository, and of all."""
    groups: dict[tuple[str, str], list[Replayed]] = {}
    for entry in found:
        groups.setdefault((entry[0].repository, entry[0].torch or "?"), []).append(entry)
    groups[("all", "")] = list(found)
    rows = [
        (
            repository,
            version,
            len(entries),
            f"{sum(outcome.requests for _, outcome, _ in entries):,}",
            f"{sum(outcome.segments for _, outcome, _ in entries):,}",
            f"{max((outcome.reserved_peak[1] for _, outcome, _ in entries), default=0):,}",
            sum(1 for _, outcome, _ in entries if outcome.is_exact),
            sum(1 for _, _, own in entries if own.reserved_peak[0] == own.reserved_peak[1]),
        )
        for (repository, version), entries in groups.items()
    ]
    headers = "recordings of|torch|number|requests|new segments|reserved, at most|all the same|"
    headers += "reserved peak with own addresses"
    return tabulate(rows, headers=headers.split("|"), disable_numparse=True)


def _relative(pair: tuple[int, int]) -> str:
    traced, recorded = pair
    return f"{(traced - recorded) / max(1, recorded):+.3%}"


def traced_table(available: Sequence[tuple[Source, Path]]) -> str:
    """Return the comparison of programs that are written out with their recordings."""
    rows = []
    for source, path in available:
        if source.name not in PROGRAMS:
            continue
        found = compare(*PROGRAMS[source.name], histories(path)[0])
        reserved, recorded = found.reserved
        rows.append(
            (
                source.name.replace("_memory_snapshot.pickle", ""),
                source.torch or "?",
                f"{found.requests[1]:,}",
                f"{found.requests[1] - found.same}",
                f"{found.requests[0] - found.same}",
                f"{found.peak[1]:,}",
                f"{found.peak[0] - found.peak[1]:+,}",
                *(
                    ("-", "-", "")
                    if source.name in PARTS
                    else (f"{recorded:,}", f"{reserved - recorded:+,}", _relative(found.reserved))
                ),
            )
        )
    headers = "recorded|torch|requests|not traced|only traced|requested peak|error|reserved|error|"
    return tabulate(rows, headers=headers.split("|"), disable_numparse=True)


def kineto_table(available: Sequence[tuple[Source, Path]]) -> str:
    """Return the comparison of recorded steps of ResNet-50."""
    rows, only = [], dict[str, int]()
    for source, path in available:
        found = compare_step(read_step(path), resnet50_training, "v100")
        only = only or dict(found.only_recorded)
        rows.append(
            (
                source.path.rpartition("/")[2],
                found.gpu,
                found.requests[1],
                found.requests[1] - found.same,
                f"{found.peak[1]:,}",
                f"{found.peak[0] - found.peak[1]:+,}",
                _relative(found.peak),
            )
        )
    headers = ("trace", "GPU", "requests", "not traced", "peak of the step", "error", "")
    tables = tabulate(rows, headers=headers, disable_numparse=True)
    named = tabulate(only.items(), headers=("in the first alone, or of another size", "requests"))
    return f"{tables}\n\n{named}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 where the allocator's replay differs from a recording."""
    parser = command("truth.published", __doc__)
    parser.add_argument("directory", type=Path, help="where the recordings are kept")
    parser.add_argument("--download", action="store_true", help="fetch those that are missing")
    parser.add_argument("--replay", action="store_true", help="replay the requests, trace nothing")
    parser.add_argument("--only", default="", help="regular expression for the sources")
    options = parser.parse_args(arguments)
    available: list[tuple[Source, Path]] = []
    for source in sources():
        if not re.search(options.only, source.name):
            continue
        try:
            if options.download:
                source.download(options.directory)
            available.append((source, source.check(options.directory)))
        except (SourceError, OSError) as error:
            print(f"left out: {error}")
    if not available:
        parser.error(f"{options.directory} has none of the recordings; --download fetches them")
    snapshots = [entry for entry in available if entry[0].is_snapshot]
    found: list[Replayed] = []
    for source, path in snapshots:
        try:
            found += [
                (source, replay(history), replay(history, recorded_addresses=False))
                for history in histories(path)
                if history.requests > 1  # else its recording was not on
            ]
        except SnapshotError as error:
            parser.error(f"{source.name}: {error}")
    print(f"The caching allocator, replayed\n{replay_table(found)}")
    different = [
        f"{source.name}: {outcome.first or 'the figures differ'}"
        for source, outcome, _ in found
        if not outcome.is_exact
    ]
    print("\n".join(different))
    if not options.replay:
        print(f"\nPrograms, traced\n{traced_table(snapshots)}")
        steps = [entry for entry in available if not entry[0].is_snapshot]
        if steps:
            print(f"\nSteps of ResNet-50, traced\n{kineto_table(steps)}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
