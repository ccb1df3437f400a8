"""How long a trace with ``values="real"`` takes against the same step for real on the CPU.

    python -m benchmarks.real_values_time
    python -m benchmarks.real_values_time --published 'gpt2|resnet'   models of the zoo, too

Both run one after the other in each round, on one thread and in processor time; the table has the
median of the rounds' ratios. The first round, in which a trace finds what later ones remember, is
left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import pytest_torchmem as torchmem
from benchmarks.conformance.report import machine
from benchmarks.isolation.sample import Named
from benchmarks.zoo import published
from pytest_torchmem.step.step import Step

Program = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[], Program]


def perceptron() -> Program:
    """Return four wide linear layers, and 256 rows."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(256, 1024),), {}


def convolutions() -> Program:
    """Return blocks of convolution and batch norm, and 16 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 128), (128, 128)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(16, 3, 32, 32),), {}


def encoder() -> Program:
    """Return four encoder layers, and eight sequences of 128."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    return (
        nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        (torch.randn(8, 128, 256),),
        {},
    )


PROGRAMS: dict[str, Build] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "encoder": encoder,
}


def published_program(model: Named) -> Program:
    """Return a model of published width, and what it is trained on."""
    sample = next(published.samples(model))
    return sample.target, sample.args, dict(sample.kwargs)


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(build: Build, rounds: int) -> tuple[float, list[float]]:
    """Return the median seconds of the real step, and each round's ratio to it."""
    torch.manual_seed(0)
    model, args, kwargs = build()
    whole = Step(optimizer=torch.optim.AdamW)

    def step() -> None:
        model.zero_grad()
        whole.run(model, args, kwargs)

    def traced() -> None:
        torchmem.trace(
            model, *args, device="cpu", optimizer=torch.optim.AdamW, values="real", **kwargs
        )

    found = []
    for _ in range(rounds + 1):
        real = _seconds(step)
        found.append((real, _seconds(traced) / real))
    return statistics.median(real for real, _ in found[1:]), [ratio for _, ratio in found[1:]]


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--published", help="regular expression for models of benchmarks.zoo")
    options = parser.parse_args()
    rounds, programs = options.rounds, dict(PROGRAMS)
    if options.published:
        for model in published.models(options.published):
            programs[model.case] = partial(published_program, model)
    torch.set_num_threads(1)
    rows = []
    for name, build in programs.items():
        real, found = ratios(build, rounds)
        middle = statistics.median(found)
        rows.append(
            (
                name,
                f"{1e3 * real:.0f} ms",
                f"{middle:.2f}",
                f"{min(found):.2f}",
                f"{max(found):.2f}",
            )
        )
    headers = ("step", "for real", 'values="real"', "least", "most")
    print(tabulate(rows, headers=headers))
    print(machine())


if __name__ == "__main__":
    main()
