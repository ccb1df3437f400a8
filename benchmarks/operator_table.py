"""Print what the records say of operators whose path on a GPU is another than on the CPU.

python -m benchmarks.operator_table            the table of docs/cuda-operators.md
python -m benchmarks.operator_table --write    the same, written into the page
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_torchmem.operators.registry import OperatorRecord, load, records

PAGE = Path(__file__).parents[1] / "docs" / "cuda-operators.md"
BEGIN, END = "<!-- operators: begin -->\n", "<!-- operators: end -->\n"
_SYMMETRIC_MEMORY = "torch/distributed/_symmetric_memory/__init__.py"
_OF_LIBRARIES = frozenset({"bitsandbytes/backends", _SYMMETRIC_MEMORY})
"""The sources of records that are there only once a program has imported the library."""
_FUNCTIONS = {
    "path": "made of other operators",
    "meta": "outputs lie in another way",
    "decomposition": "a kernel that calls operators",
    "nested": "nested tensors",
    "storages": "outputs on larger storages",
}


def table() -> str:
    """Return the table in Markdown, a line for each function or fact, operators joined."""
    load()
    found: dict[tuple[str, str], list[str]] = {}
    for name, record in sorted(records().items()):
        if record.source in _OF_LIBRARIES:
            continue
        for what, why in _differences(record):
            found.setdefault((what, why), []).append(f"`{name.removeprefix('aten::')}`")
    lines = ["| operators | on a GPU | |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {what} | {why} |" for (what, why), names in found.items()]
    return "\n".join(lines) + "\n"


def _differences(record: OperatorRecord) -> Iterator[tuple[str, str]]:
    """Yield what a record says of the GPU alone, and why."""
    for aspect, what in _FUNCTIONS.items():
        function = getattr(record, aspect).get("cuda")
        if function is not None:
            yield what, _first_sentence(function)
    if "cuda" in record.kernel_on:
        yield "one kernel", record.source
    if "cuda" in record.not_on:
        yield "torch has no kernel", record.source
    if "cuda" in record.order:
        positions = ", ".join(map(str, record.order["cuda"]))
        yield f"makes its outputs in the order {positions}", record.source
    if "cuda" in record.host_outputs and "cpu" not in record.host_outputs:
        positions = ", ".join(map(str, record.host_outputs["cuda"]))
        yield f"makes the outputs {positions} on the host", record.source
    if record.library_output is not None or record.library_state:
        yield "the size of an output is cuDNN's to decide", record.source


def _first_sentence(function: Callable[..., Any]) -> str:
    text = " ".join((function.__doc__ or "").split())
    sentence = re.split(r"(?<=[^.]\w)\. (?=[A-Z`a-z])", text)[0].rstrip(".")
    return sentence.replace("``", "`").replace("|", "\\|")


def written(page: str) -> str:
    """Return a page with its table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write it into docs/cuda-operators.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
