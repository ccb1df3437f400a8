"""The rules, by what they look at. To import them registers them."""

from pytest_torchmem.diagnosis.rules import (
    attention,
    copies,
    layers,
    lifetimes,
    operators,
    recording,
    setup,
    types,
)

__all__ = ["attention", "copies", "layers", "lifetimes", "operators", "recording", "setup", "types"]
