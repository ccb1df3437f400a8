"""The steps of other libraries' models, by ``library/model``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.isolation.sample import Named, Sample, named


@dataclass(frozen=True, slots=True)
class Step:
    """A model, its inputs, and how it is trained; by default with AdamW on the output's sum."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any], Any] | None = None
    optimizer: Callable[..., Any] | None = torch.optim.AdamW
    steps: int = 1

    def sample(self) -> Sample:
        """Return the step as benchmarks run it."""
        options = {"loss_fn": self.loss_fn, "optimizer": self.optimizer, "steps": self.steps}
        return Sample(0, self.model, self.args, self.kwargs, options)


Build = Callable[[], Step]
STEPS: dict[str, Build] = {}
"""Functions that import a library and build a step; importing them needs no library."""


def register(name: str) -> Callable[[Build], Build]:
    """Add a step to the registry."""

    def add(build: Build) -> Build:
        STEPS[name] = build
        return build

    return add


def import_steps() -> None:
    """Fill the registry."""
    for name in ("diffusion", "language", "optimizers", "science", "vision"):
        import_module(f"benchmarks.libraries.{name}")


def models(pattern: str = "") -> list[Named]:
    """Return the models whose name has a match of the regular expression ``pattern``."""
    return named(STEPS, pattern)


def samples(model: Named, limit: int = 0) -> Iterator[Sample]:
    """Yield the model's step; raises what a library that is not there raises."""
    import_steps()  # the process that runs a sample imports no more than this module
    torch.manual_seed(0)
    yield STEPS[model.case]().sample()
