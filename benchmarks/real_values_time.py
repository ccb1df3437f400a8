"""How long a trace with ``values="real"`` takes against the same step for real on the CPU.

    python -m benchmarks.real_values_time

Both run one after the other in each round, on one thread and in processor time; the table has the
median of the rounds' ratios. The first round, in which a trace finds what later ones remember, is
left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

import pytest_torchmem as torchmem
from benchmarks.conformance.report import machine
from pytest_torchmem.step.step import Step

Build = Callable[[], tuple[nn.Module, Tensor]]


def perceptron() -> tuple[nn.Module, Tensor]:
    """Return four wide linear layers, and 256 rows."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(256, 1024)


def convolutions() -> tuple[nn.Module, Tensor]:
    """Return blocks of convolution and batch norm, and 16 images."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 64), (64, 128), (128, 128)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(16, 3, 32, 32)


def encoder() -> tuple[nn.Module, Tensor]:
    """Return four encoder layers, and eight sequences of 128."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 128, 256)


PROGRAMS: dict[str, Build] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "encoder": encoder,
}


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratios(build: Build, rounds: int) -> tuple[float, list[float]]:
    """Return the median seconds of the real step, and each round's ratio to it."""
    torch.manual_seed(0)
    model, data = build()
    whole = Step(optimizer=torch.optim.AdamW)

    def step() -> None:
        model.zero_grad()
        whole.run(model, (data,), {})

    def traced() -> None:
        torchmem.trace(model, data, device="cpu", optimizer=torch.optim.AdamW, values="real")

    found = []
    for _ in range(rounds + 1):
        real = _seconds(step)
        found.append((real, _seconds(traced) / real))
    return statistics.median(real for real, _ in found[1:]), [ratio for _, ratio in found[1:]]


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for name, build in PROGRAMS.items():
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
