"""Traced against measured peaks of everyday models, one line each.

python -m benchmarks.examples_accuracy
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from benchmarks.comparison import PHASES, Comparison, compare, error_table
from benchmarks.conformance.report import machine
from benchmarks.language_models import BERT, GPT2, LLAMA, LanguageModel

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Tagger:
    """What the recurrent examples are made of."""

    layer: Callable[..., nn.RNNBase]

    def build(self) -> Example:
        """Return a recurrent layer of width 256 over 64 steps."""
        return self.layer(128, 256, 2, batch_first=True), (torch.randn(16, 64, 128),), {}


def language(model: LanguageModel) -> Callable[[], Example]:
    """Return what builds a language model on the CPU."""
    return lambda: (model.build("cpu"), (), dict(model.inputs("cpu")))


def encoder() -> Example:
    """Return torch's own encoder with dropout."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 4), (torch.randn(8, 128, 256),), {}


def perceptron() -> Example:
    """Return linear layers."""
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10)
    )
    return model, (torch.randn(64, 784),), {}


def convolutional() -> Example:
    """Return convolutions with batch norm, a ResNet's first stages."""
    layers: list[nn.Module] = []
    for inner, outer in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return model, (torch.randn(8, 3, 64, 64),), {}


EXAMPLES: dict[str, Callable[[], Example]] = {
    GPT2.name: language(GPT2),
    LLAMA.name: language(LLAMA),
    BERT.name: language(BERT),
    "encoder, dropout": encoder,
    "perceptron": perceptron,
    "CNN, batch norm": convolutional,
    "LSTM": Tagger(nn.LSTM).build,
    "GRU": Tagger(nn.GRU).build,
}


def comparisons() -> Iterator[Comparison]:
    """Yield a comparison of each example's step with AdamW."""
    for name, make in EXAMPLES.items():
        torch.manual_seed(0)
        model, args, kwargs = make()
        yield compare(name, model, *args, optimizer=torch.optim.AdamW, **kwargs)


def main() -> int:
    """Print one line per example and phase."""
    warnings.simplefilter("ignore")
    found = list(comparisons())
    rows = []
    for comparison in found:
        for phase in PHASES:
            name = f"{phase}_peak"
            difference = comparison.difference(phase)
            rows.append(
                (
                    comparison.case if phase == "forward" else "",
                    phase,
                    f"{comparison.traced.get(name, 0):,}" if comparison.traced else "-",
                    f"{comparison.measured.get(name, 0):,}",
                    f"{difference:+,}" if comparison.traced and difference is not None else "-",
                    comparison.error[:80] if phase == "forward" else "",
                )
            )
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    headers = ("model", "peak", "traced", "measured", "difference", "error")
    print(
        tabulate(
            rows,
            headers=headers,
            disable_numparse=True,
            colalign=("left",) * 2 + ("right",) * 3 + ("left",),
        )
    )
    print(f"\n{error_table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
