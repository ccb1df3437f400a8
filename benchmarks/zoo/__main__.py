"""Trace and measure the training steps of whole models, and print how far apart they are.

python -m benchmarks.zoo                      all models, AdamW and SGD with momentum
python -m benchmarks.zoo -k 'bert|lstm'       models whose name matches
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.comparison import PHASES, Comparison, Status, error_table
from benchmarks.conformance import report
from benchmarks.isolation.sample import Sample
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.networks import NETWORKS

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the zoo by its name."""

    name: str

    @property
    def case(self) -> str:
        """Return the model's name within a run."""
        return self.name


def models(pattern: str = "") -> list[Model]:
    """Return the models whose name has a match of the regular expression ``pattern``."""
    search = re.compile(pattern).search
    return [Model(name) for name in (*NETWORKS, *ARCHITECTURES) if search(name)]


def samples(model: Model, limit: int = 0) -> Iterator[Sample]:
    """Yield the model's step with each optimizer."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for index, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        torch.manual_seed(0)
        options = {"optimizer": optimizer}
        if model.name in NETWORKS:
            network, args = NETWORKS[model.name]()
            yield Sample(index, network, args, options=options, detail=name)
        else:
            network, kwargs = ARCHITECTURES[model.name].build()
            yield Sample(index, network, kwargs=kwargs, options=options, detail=name)


def models_table(comparisons: Sequence[Comparison]) -> str:
    """Return one line per step that is not exact in every phase, the furthest first."""
    rows = []
    for found in sorted(comparisons, key=_error, reverse=True):
        if found.status is Status.EXACT:
            continue
        differences = [found.difference(phase) for phase in PHASES]
        relative = [found.relative(phase) for phase in PHASES[:2]]
        rows.append(
            (
                f"{found.case} {found.detail}",
                found.status.value,
                *("-" if d is None else f"{d:+,}" for d in differences),
                *("-" if r is None else f"{r:+.3%}" for r in relative),
                found.error[:100],
            )
        )
    headers = ("step", "status", *(f"{phase} bytes" for phase in PHASES))
    headers += ("forward error", "backward error", "why not")
    return tabulate(rows, headers=headers, disable_numparse=True)


def _error(found: Comparison) -> float:
    return max(abs(found.relative(phase) or 0.0) for phase in PHASES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the zoo and print its tables; return 1 if a peak is more than 0.1 % off."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one step")
    parser.add_argument("--output", type=Path, help="JSON file for every comparison")
    options = parser.parse_args(arguments)
    kept: list[Comparison] = []
    limits = Limits(0, options.seconds, options.threads)
    Supervisor(models(options.pattern), samples, limits, kept.append).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case)
    if options.output:
        report.write(options.output, kept)
    counts = {status.value: sum(1 for c in kept if c.status is status) for status in Status}
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    print(f"{len(kept)} steps:", ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    print(f"\n{models_table(kept)}\n\n{error_table(kept)}")
    lost = (Status.UNSUPPORTED, Status.CRASHED, Status.SKIPPED)
    return int(any(found.status in lost or _error(found) > 0.001 for found in kept))


if __name__ == "__main__":
    sys.exit(main())
