"""Optimizers of other libraries, two steps of each."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.libraries.registry import Step, register

Make = Callable[[Any, Any], Any]


def _schedule_free(module: Any, parameters: Any) -> Any:
    optimizer = module.AdamWScheduleFree(parameters)
    optimizer.train()
    return optimizer


#: By name, the module of the optimizer, and what makes it of the module and the parameters.
OPTIMIZERS: dict[str, tuple[str, Make]] = {
    "lion-pytorch/Lion": ("lion_pytorch", lambda lion, p: lion.Lion(p)),
    "prodigyopt/Prodigy": ("prodigyopt", lambda prodigy, p: prodigy.Prodigy(p)),
    "came-pytorch/CAME": ("came_pytorch", lambda came, p: came.CAME(p, lr=1e-3)),
    "schedulefree/AdamWScheduleFree": ("schedulefree", _schedule_free),
    "transformers/Adafactor": (
        "transformers.optimization",
        lambda optimization, p: optimization.Adafactor(p, lr=1e-3, relative_step=False),
    ),
    "torchao/AdamW8bit": ("torchao.optim", lambda optim, p: optim.AdamW8bit(p)),
    "bitsandbytes/AdamW8bit": (
        "bitsandbytes",
        lambda bitsandbytes, p: bitsandbytes.optim.AdamW8bit(p, min_8bit_size=1024),
    ),
}


def _stepped(name: str) -> Step:
    module_name, make = OPTIMIZERS[name]
    module = import_module(module_name)  # its own tensors are none of the step's
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return Step(
        model,
        (torch.randn(8, 64),),
        optimizer=lambda parameters: make(module, list(parameters)),
        steps=2,
    )


for _name in OPTIMIZERS:
    register(_name)(lambda name=_name: _stepped(name))
