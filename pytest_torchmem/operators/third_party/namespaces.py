"""Which module knows the operators of which other package."""

from __future__ import annotations

from functools import cache
from importlib import import_module

_COLLECTIVES = "pytest_torchmem.operators.distributed.collectives"
_DESCRIBED_IN = {
    "bitsandbytes": "pytest_torchmem.operators.third_party.bitsandbytes",
    "c10d": _COLLECTIVES,
    "_c10d_functional": _COLLECTIVES,
    "_c10d_functional_autograd": _COLLECTIVES,
    "torch_attn": "pytest_torchmem.operators.attention.varlen",
    "torchvision": "pytest_torchmem.operators.third_party.torchvision",
    "fsdp": "pytest_torchmem.operators.distributed.fully_shard",
    "symm_mem": "pytest_torchmem.operators.distributed.symmetric_memory",
}
"""Modules by the namespace of the operators that their ``describe()`` makes records of."""


@cache
def describe_namespace(namespace: str) -> None:
    """Make the records of the operators of a package that the program has imported."""
    if namespace in _DESCRIBED_IN:
        import_module(_DESCRIBED_IN[namespace]).describe()
