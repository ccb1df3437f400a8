"""Whether a test says that it expects a check to fail: ``with pytest.raises(AssertionError):``."""

import ast
import linecache
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

_GROUP = "RaisesGroup"
_EXPECT = ("raises", "assertRaises", "assertRaisesRegex", _GROUP, "RaisesExc")
_EXPECTING = (("_pytest", "raises.py"), ("_pytest", "python_api.py"), ("unittest", "case.py"))
"""The files of what calls a function and expects it to raise, in any version of pytest."""
_SUPPRESS = "suppress"
_LIBRARIES = ("_pytest", "pytest", "unittest", "contextlib")
_Catching = ast.With | ast.AsyncWith | ast.Try
_CATCHING = (ast.With, ast.AsyncWith, ast.Try, getattr(ast, "TryStar", ast.Try))  # of Python 3.11
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def expecting_blocks(frame: FrameType | None) -> set[str]:
    """Return the names of expecting blocks around the running line or a caller of it."""
    found = set()
    while frame is not None and Path(frame.f_code.co_filename).parent.name != "_pytest":
        if _calls_and_expects(frame.f_code):
            found.add(frame.f_code.co_name)
        for statement in _around(frame, frame.f_lineno):
            if isinstance(statement, ast.With | ast.AsyncWith):
                names = (_called(item.context_expr, frame) for item in statement.items)
                found.update(name for name in names if name in _EXPECT)
        frame = frame.f_back
    return found


def failure_is_expected(error: BaseException, blocks: set[str]) -> bool:
    """Tell whether the code that caught a failure declared that it expects one.

    That is in the frame that the traceback came to last. Where there is none any more (unittest
    takes it away; case.py, ``_AssertRaisesContext.__exit__``), or the failure was caught to become
    a part of another one, ``blocks`` tell: those that stood around it when it was raised.
    """
    traceback = error.__traceback__
    if traceback is None or _GROUP in blocks:
        return bool(blocks)
    frame = traceback.tb_frame
    if _calls_and_expects(frame.f_code):
        return True
    for statement in _around(frame, traceback.tb_lineno):
        if isinstance(statement, ast.With | ast.AsyncWith):
            for item in reversed(statement.items):
                name = _called(item.context_expr, frame)
                if name and _may_catch(item.context_expr, frame, error):
                    return name in _EXPECT
            continue
        for handler in statement.handlers:
            if handler.type is None or _is_one(handler.type, frame, error) is not False:
                raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
                return raises and bool(blocks)  # as another one
    return False


def _calls_and_expects(code: CodeType) -> bool:
    file = Path(code.co_filename)
    return (file.parent.name, file.name) in _EXPECTING and code.co_name in (*_EXPECT, "handle")


def _around(frame: FrameType, line: int) -> list[_Catching]:
    """Return the statements of a frame's own function whose body a line is in, innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    statements = _statements(_function(tree, frame.f_code))
    return [one for one in statements if one.body[0].lineno <= line <= (_last(one) or line)]


def _statements(node: ast.AST) -> Iterator[_Catching]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield from _statements(child)
            if isinstance(child, _CATCHING):
                yield child


def _last(statement: _Catching) -> int | None:
    return statement.body[-1].end_lineno


def _function(tree: ast.AST, code: CodeType) -> ast.AST:
    """Return what a code object was compiled from: a function, or else the module."""
    for node in ast.walk(tree):
        if getattr(node, "name", "") == code.co_name and isinstance(node, _Function):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            if first == code.co_firstlineno:
                return node
    return tree


def _called(expression: ast.expr, frame: FrameType) -> str:
    """Return what catches errors for an expression, under any name: "raises"; "" for all else.

    A function that has only the name, and belongs to the program, may catch whatever comes.
    """
    if not isinstance(expression, ast.Call):
        return ""
    called = _value(expression.func, frame)
    name = getattr(expression.func, "attr", "") or getattr(expression.func, "id", "")
    if called is not None:
        name = getattr(called, "__name__", "")
        if str(getattr(called, "__module__", "")).partition(".")[0] not in _LIBRARIES:
            return ""
    return name if name in (*_EXPECT, _SUPPRESS) else ""


def _may_catch(call: ast.expr, frame: FrameType, error: BaseException) -> bool:
    """Tell whether ``raises`` or ``suppress`` is given a type of an error, or one unknown."""
    assert isinstance(call, ast.Call)
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "expected_exception")]
    return not given or any(_is_one(one, frame, error) is not False for one in given)


def _is_one(types: ast.expr, frame: FrameType, error: BaseException) -> bool | None:
    """Tell whether an error is of the types that an expression names, ``None`` if unknown."""
    if isinstance(types, ast.Tuple):
        told = [_is_one(one, frame, error) for one in types.elts]
        return True if True in told else None if None in told else False
    value = _value(types, frame)
    if isinstance(value, type) or (isinstance(value, tuple) and value):
        try:
            return isinstance(error, value)
        except TypeError:
            return None
    return None


def _value(expression: ast.expr, frame: FrameType) -> object:
    """Return what a name, or an attribute of one, stands for in a frame; ``None`` if unknown."""
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, frame), expression.attr, None)
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expression.id in names:
                found: object = names[expression.id]
                return found
    return None
