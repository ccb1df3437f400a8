"""The same step for real, on a real device, as its allocator sees it."""

from pytest_torchmem.measurement.cpu import measure

__all__ = ["measure"]
