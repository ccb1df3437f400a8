"""Whether a test says that it expects a check to fail: ``with pytest.raises(AssertionError):``."""

from __future__ import annotations

import ast
import linecache
from pathlib import Path
from types import FrameType

_EXPECT = ("raises", "assertRaises", "assertRaisesRegex", "RaisesGroup")
_EXPECTING = (("_pytest", "raises.py"), ("_pytest", "python_api.py"), ("unittest", "case.py"))
"""The files of what calls a function and expects it to raise, in any version of pytest."""


def failure_is_expected(frame: FrameType | None) -> bool:
    """Tell whether a line that is running, or one that called it, stands in such a block.

    Nothing is left of a block by the time that a test ends, so its source is asked when the check
    raises. Other ways to catch a failure leave open whether anybody looks at it.
    """
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        place = (file.parent.name, file.name)
        if place in _EXPECTING and frame.f_code.co_name in (*_EXPECT, "handle"):
            return True
        if place[0] == "_pytest":
            return False  # what runs the test
        if _in_block(str(file), frame.f_lineno):
            return True
        frame = frame.f_back
    return False


def _in_block(file: str, line: int) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return any(
        node.body[0].lineno <= line <= (node.body[-1].end_lineno or line)
        and any(_name(item.context_expr) in _EXPECT for item in node.items)
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
    )


def _name(expression: ast.expr) -> str:
    """Return the name of the function that an expression calls: "raises"."""
    if not isinstance(expression, ast.Call):
        return ""
    called = expression.func
    return getattr(called, "attr", "") or getattr(called, "id", "")
