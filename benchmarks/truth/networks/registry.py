"""The models by name, each with its sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Network:
    """A model by its name, ``family/name``."""

    name: str
    make: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]
    full: dict[str, Any]
    tiny: dict[str, Any]

    @property
    def family(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]

    def sizes(self, tiny: bool) -> dict[str, Any]:
        """Return the arguments of the model, and of its inputs."""
        return self.tiny if tiny else self.full


NETWORKS: dict[str, Network] = {}

Inputs = Callable[..., tuple[Tensor, ...]]
Sizes = dict[str, Any]


def network(
    name: str, inputs: Inputs, full: Sizes, tiny: Sizes
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Register a function that makes a model; ``inputs`` gets the same sizes by name.

    ``tiny`` has the sizes that are others in a test.
    """

    def register(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        if name in NETWORKS:
            raise ValueError(f"{name} is already registered")
        NETWORKS[name] = Network(name, make, inputs, full, {**full, **tiny})
        return make

    return register
