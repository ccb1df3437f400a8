"""Which lines of an author's files a run executed, and how often; and where two runs parted.

A line that was executed more or less often in the trace than in the real run means that a branch
was taken which is not taken for real, unless the program itself asks for the device there.
"""

import ast
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Counts = dict[str, dict[int, int]]
DEVICE = re.compile(r"cuda|device|is_available|accel|amp\b|autocast|fused|gpu", re.IGNORECASE)

#: What whoever looks at a module or a tensor calls.
_LOOKS = ("__hash__", "__eq__", "__repr__", "shape", "dtype", "device", "ndim")


@contextmanager
def executed_lines(folders: tuple[str, ...], script: str) -> Iterator[Counts]:
    """Count the lines executed in files below ``folders``, but of modules only those of the script.

    Whether a module is imported once more says nothing of the program.
    """
    counts: dict[str, Counter[int]] = {}
    # By id: code that Dynamo makes has constants without a hash, slices in Python 3.11.
    wanted: dict[int, tuple[CodeType, Counter[int] | None]] = {}

    def counter_of(code: CodeType) -> Counter[int] | None:
        name = code.co_filename
        if not name.startswith(folders) or (code.co_name == "<module>" and name != script):
            return None
        if name.endswith("_meta_registrations.py"):  # what a trace asks for the outputs' shapes
            return None
        if code.co_name in _LOOKS:
            return None
        return counts.setdefault(name, Counter())

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if id(code) not in wanted:
            wanted[id(code)] = code, counter_of(code)
        _, counter = wanted[id(code)]
        if counter is None:
            return None

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                counter[frame.f_lineno] += 1
            return on_line

        return on_line

    result: Counts = {}
    before = sys.gettrace()
    threading.settrace(on_call)
    sys.settrace(on_call)
    try:
        yield result
    finally:
        sys.settrace(before)
        threading.settrace(None)
        result.update({name: dict(sorted(lines.items())) for name, lines in counts.items()})


_FOLDER = re.compile(r"^.*/(site-packages|[^/]+-[0-9a-f]{16})/")
"""Where a library is installed, or a fetched program is kept: another folder on each machine."""


def first_difference(real: Counts, traced: Counts) -> str:
    """Return where the two runs parted, in one line, or nothing if they did not."""
    for name in sorted(set(real) | set(traced)):
        here, there = real.get(name, {}), traced.get(name, {})
        other = [line for line in {*here, *there} if here.get(line, 0) != there.get(line, 0)]
        if not other:
            continue
        text = _source(name)
        excused = _lines_that_ask_for_the_device(text)
        for line in sorted(other):
            if line not in excused:
                times = f"{here.get(line, 0)} times for real, {there.get(line, 0)} traced"
                source = "".join(text[line - 1 : line]).strip()[:90]
                return f"{_FOLDER.sub('', name)}:{line}: {times}: {source}"
    return ""


def _source(name: str) -> list[str]:
    path = Path(name)
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _lines_that_ask_for_the_device(text: list[str]) -> set[int]:
    """Return the lines that name a device, and those of all branches of such a condition."""
    found = {number for number, line in enumerate(text, 1) if DEVICE.search(line)}
    try:
        tree = ast.parse("\n".join(text))
    except SyntaxError:
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp)):
            test = range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1)
            if not found.isdisjoint(test):
                found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found
