"""Which modules register what is known of operators: torch's, and those of other packages.

Each is imported when an operator is met that it speaks of, by the index of ``index.json``: a model
uses few of them.
"""

import json
from functools import cache
from importlib import import_module
from importlib.resources import files
from pkgutil import walk_packages

PACKAGE = __name__.rpartition(".")[0]
INDEX = "index.json"
"""Beside this module; written by ``python -m benchmarks.operator_index --write``."""

BY_VERSION = frozenset({"elementwise"})
"""Modules that speak of other operators with other versions of torch, and stand in no index."""


@cache
def read_index() -> dict[str, dict[str, str]]:
    """Return the names of operators, those of ATen without namespace: what each of the ``modules``
    speaks of, and for each of the devices in ``paths`` those that have a path there.
    """
    found: dict[str, dict[str, str]] = json.loads(files(PACKAGE).joinpath(INDEX).read_text("utf-8"))
    return found


@cache
def load() -> None:
    """Import every family."""
    for module in walk_packages(import_module(PACKAGE).__path__, f"{PACKAGE}."):
        import_module(module.name)


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
    for module, names in read_index()["modules"].items():
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
    "torch_attn": "pytest_torchmem.operators.attention.values",
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
