"""Which modules register what is known of operators: torch's, and those of other packages.

Each is imported when an operator is met that it speaks of, by the index of ``index.py``: a model
uses few of them.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from pytest_torchmem.operators.index import NAMES

PACKAGE = __name__.rpartition(".")[0]
_MODULES = {
    "": (
        "activations checks checks_of_values derivatives elementwise embedding factories foreach "
        "fourier histograms losses nested quantization random resampling workspace_of"
    ),
    "attention": "choice dot_product efficient flash flash_for_cpu multi_head values varlen",
    "convolution": "alone convolution",
    "distributed": "fully_shard",
    "indexing": "advanced masks rearrange rows",
    "linear_algebra": "cusolver distance lapack lu work",
    "matmul": "low_precision products",
    "normalization": "batch_norm cudnn_batch_norm group_norm layer_norm sync_batch_norm",
    "recurrent": "cudnn layers onednn values",
    "reduction": "sums",
    "sorting": "distinct order",
    "sparse": "compressed coo",
}
"""By the folder of a family."""

BY_VERSION = frozenset({"elementwise"})
"""Modules that speak of other operators with other versions of torch, and stand in no index."""


@cache
def load() -> None:
    """Import every family."""
    for folder, modules in _MODULES.items():
        for module in modules.split():
            import_module(".".join(filter(None, (PACKAGE, folder, module))))


def load_for(name: str) -> None:
    """Import the families that speak of an operator or overload (``"aten::mm"``)."""
    waiting = _waiting()
    for module in waiting.get(name, ()):
        import_module(f"{PACKAGE}.{module}")
    waiting.pop(name, None)


@cache
def _waiting() -> dict[str, tuple[str, ...]]:
    """Return the modules that speak of operators which nobody has asked for yet."""
    for module in BY_VERSION:
        import_module(f"{PACKAGE}.{module}")
    found: dict[str, tuple[str, ...]] = {}
    for module, names in NAMES.items():
        for name in names.split():
            full = name if "::" in name else f"aten::{name}"
            found[full] = (*found.get(full, ()), module)
    return found


_COLLECTIVES = "pytest_torchmem.operators.distributed.collectives"
_BY_NAMESPACE = {
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
    if namespace in _BY_NAMESPACE:
        import_module(_BY_NAMESPACE[namespace]).describe()
