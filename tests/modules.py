"""Modules that tests are written with."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Parts(nn.Module):
    """A module of the modules, parameters, buffers and other attributes that it is given."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if buffer else setattr(self, name, part)


class Checkpointed(Parts):
    """A module of an inner one, whose forward the backward computes again."""

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def trained(model: nn.Module, x: Tensor) -> None:
    """Call a module in another file than that of the program, and go backward."""
    model(x).square().mean().backward()
