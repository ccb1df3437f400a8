"""Write which family speaks of which operator: ``pytest_torchmem/operators/index.py``.

python -m benchmarks.operator_index --write
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pytest_torchmem.operators import index
from pytest_torchmem.operators.families import BY_VERSION, PACKAGE, load
from pytest_torchmem.operators.registry import DESCRIBED, records

_BEGIN = '''"""Which modules speak of which operators: a trace imports those that it needs.

Those of ATen are without namespace. Written by ``python -m benchmarks.operator_index --write``.
"""

from __future__ import annotations

NAMES = {
'''


_PATHS = '''#: Operators that have a path on cuda.
CUDA_PATHS = """'''
_OF_TORCH = ("aten::", "prims::")
"""Namespaces of operators that are always there; ``operators/families.py`` has the others."""


def text() -> str:
    """Return the index as Python."""
    load()
    lines = []
    for module, names in sorted(DESCRIBED.items()):
        family = module.removeprefix(f"{PACKAGE}.")
        known = sorted(name.removeprefix("aten::") for name in names if name.startswith(_OF_TORCH))
        if module.startswith(f"{PACKAGE}.") and known and family not in BY_VERSION:
            listed = textwrap.wrap(" ".join(known), 91, break_on_hyphens=False)
            lines += [f'    "{family}": """', *(f"        {line}" for line in listed), '    """,']
    paths = sorted(name for name, record in records().items() if "cuda" in record.path)
    listed = textwrap.wrap(" ".join(name.removeprefix("aten::") for name in paths), 95)
    return "\n".join(
        [_BEGIN + "\n".join(lines), "}", _PATHS, *(f"    {one}" for one in listed), '"""', ""]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the index, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_index")
    parser.add_argument("--write", action="store_true")
    if parser.parse_args(arguments).write:
        Path(index.__file__).write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
