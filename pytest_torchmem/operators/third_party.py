"""Operators of other packages that are known here, described when one is first met."""

from __future__ import annotations

from functools import cache
from importlib import import_module

_COLLECTIVES = "pytest_torchmem.operators.distributed.collectives"
_DESCRIBED_IN = {
    "bitsandbytes": "pytest_torchmem.operators.libraries.bitsandbytes",
    "c10d": _COLLECTIVES,
    "_c10d_functional": _COLLECTIVES,
    "_c10d_functional_autograd": _COLLECTIVES,
    "torchvision": "pytest_torchmem.operators.libraries.torchvision",
    "fsdp": "pytest_torchmem.operators.distributed.fully_shard",
}
"""Modules by the namespace of the operators that their ``describe()`` makes records of."""


@cache
def describe_namespace(namespace: str) -> None:
    """Make the records of the operators of a package that the program has imported."""
    if namespace in _DESCRIBED_IN:
        import_module(_DESCRIBED_IN[namespace]).describe()
