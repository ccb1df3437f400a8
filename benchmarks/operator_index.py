"""Write which family speaks of which operator: ``pytest_torchmem/operators/index.json``.

python -m benchmarks.operator_index --write
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_torchmem.operators import registry
from pytest_torchmem.operators.registry import BY_VERSION, DESCRIBED, PACKAGE, load, records

INDEX = Path(registry.__file__).with_name(registry.INDEX)
_OF_TORCH = ("aten::", "prims::")
"""Namespaces of operators that are always there; ``operators/registry.py`` has the others."""


def text() -> str:
    """Return the index, a line for each family and each device."""
    load()
    modules = {}
    for module, names in sorted(DESCRIBED.items()):
        family = module.removeprefix(f"{PACKAGE}.")
        known = sorted(name.removeprefix("aten::") for name in names if name.startswith(_OF_TORCH))
        if module.startswith(f"{PACKAGE}.") and known and family not in BY_VERSION:
            modules[family] = " ".join(known)
    paths = sorted(name for name, record in records().items() if "cuda" in record.path)
    on_cuda = " ".join(name.removeprefix("aten::") for name in paths)
    return json.dumps({"modules": modules, "paths": {"cuda": on_cuda}}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the index, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_index")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args(arguments).write:
        INDEX.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
