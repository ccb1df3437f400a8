"""The rules, by what they look at. To import them registers them."""

from pytest_torchmem.diagnosis.rules import layers, lifetimes, operators, recording, setup, types

__all__ = ["layers", "lifetimes", "operators", "recording", "setup", "types"]
