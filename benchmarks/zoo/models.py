"""The models of the zoo by name, as steps to trace and measure."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.isolation.sample import Named, Sample, named
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.networks import NETWORKS

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}


def models(pattern: str = "") -> list[Named]:
    """Return the models whose name has a match of the regular expression ``pattern``."""
    return named((*NETWORKS, *ARCHITECTURES), pattern)


def samples(model: Named, limit: int = 0) -> Iterator[Sample]:
    """Yield the model's step with each optimizer."""
    import transformers

    transformers.logging.set_verbosity_error()
    for index, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        torch.manual_seed(0)
        options = {"optimizer": optimizer}
        if model.case in NETWORKS:
            network, args = NETWORKS[model.case]()
            yield Sample(index, network, args, options=options, detail=name)
        else:
            network, kwargs = ARCHITECTURES[model.case].build()
            yield Sample(index, network, kwargs=kwargs, options=options, detail=name)
