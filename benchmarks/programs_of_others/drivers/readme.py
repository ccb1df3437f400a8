"""Blocks of code of a README, run as they stand there."""

import re
from collections.abc import Callable
from pathlib import Path

import torch


def block(file: str, heading: str, number: str = "0") -> Callable[[], None]:
    """Run the block of Python code with that number below a heading, on the default device."""
    import sys

    readme = Path(sys.path[0]) / file
    below = readme.read_text(encoding="utf-8").partition(f"# {heading}\n")[2]
    if not below:
        raise LookupError(f"{file} has no heading {heading!r}")
    code = re.findall(r"```python\n(.*?)```", below, re.DOTALL)[int(number)]
    lines = "\n" * readme.read_text(encoding="utf-8").partition(code)[0].count("\n")
    compiled = compile(lines + code, str(readme), "exec")

    def program() -> None:
        if torch.cuda.is_available():
            torch.set_default_device("cuda")
        exec(compiled, {"__name__": "__main__"})

    return program
