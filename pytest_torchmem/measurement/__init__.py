"""The same step for real, on a real device, as its allocator sees it."""

from pytest_torchmem.measurement.real import measure

__all__ = ["measure"]
