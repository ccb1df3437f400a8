"""The models of the zoo by name, as steps to trace and measure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.isolation.sample import Sample
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

    transformers.logging.set_verbosity_error()
    for index, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        torch.manual_seed(0)
        options = {"optimizer": optimizer}
        if model.name in NETWORKS:
            network, args = NETWORKS[model.name]()
            yield Sample(index, network, args, options=options, detail=name)
        else:
            network, kwargs = ARCHITECTURES[model.name].build()
            yield Sample(index, network, kwargs=kwargs, options=options, detail=name)
