"""What torch's functions import of its compiler and of sympy, where they run without either.

Python's shape functions, decompositions and optimizers import ``torch._dynamo`` to say that it is
not to compile them, and ``symbolic_shapes``, with sympy, to ask whether a number is a symbol. That
takes 1.1 and 0.3 seconds where a process does so first, and 5 ms are what the rest of such a first
call takes. As long as neither is there nothing is compiled and no number is a symbol, so these
imports get what says just that.
"""

import builtins
import os
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from operator import and_, or_
from types import SimpleNamespace
from typing import Any

import torch

from pytest_torchmem.torch_private.names import private_name_if_imported
from pytest_torchmem.torch_private.patches import Replacements

COMPILER = "torch._dynamo"
"""The compiler's package."""
LOWERING = "torch._inductor"
"""Its second half."""
INDUCTOR = os.path.join("torch", "_inductor", "")
"""What the files of that have in their paths."""
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_ALGEBRA = "sympy"
_ASK_COMPILER = frozenset(
    {f"torch.{private_name_if_imported('torch._compile')}", "torch.optim.optimizer"}
)
_ASKS_ALGEBRA = f"torch.{private_name_if_imported('torch._prims_common')}"
_DISABLED = "__dynamo_disable"
"""Where ``_disable_dynamo`` keeps what it calls (torch/_compile.py)."""


class _NoAlgebra:
    """Stands in for sympy where numbers are asked whether they are of it."""

    class Basic:
        """What no number is."""


class _Compiler:
    """Stands in for ``torch._dynamo`` where nothing is compiled."""

    def __init__(self, disabled: list[Any]) -> None:
        self._disabled = disabled
        """The functions that it was asked not to compile."""

    def disable(self, function: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return what calls a function, and from when there is a compiler has that leave it."""

        def disabled(*given: Any, **named: Any) -> Any:
            if COMPILER not in sys.modules:
                return function(*given, **named)
            compiler: Any = sys.modules[COMPILER]
            return compiler.disable(function, *args, **kwargs)(*given, **named)

        self._disabled.append(function)
        return disabled

    def graph_break(self, msg: str = "") -> None:
        """Break no graph; there is none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(COMPILER), name)


class _Torch:
    """``torch`` with a compiler that stands in for its own: ``import torch._dynamo`` gives both."""

    def __init__(self, compiler: _Compiler) -> None:
        self._dynamo = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class NotNeeded:
    """Stands in for parts of torch that were not imported yet, for what torch imports of them."""

    def __init__(self) -> None:
        self._disabled: list[Any] = []
        self._torch = _Torch(_Compiler(self._disabled))
        self._symbols = SimpleNamespace(**_ON_NUMBERS)

    def stand_in(self, name: str, variables: Mapping[str, Any] | None, names: Any) -> Any:
        """Return what a function gets that imports ``names`` of a module, or None for its own.
        ``variables`` are the importing module's. A function keeps nothing of what it imports.
        """
        importer = str((variables or {}).get("__name__"))
        if importer.partition(".")[0] != "torch":
            return None
        if name == COMPILER and importer in _ASK_COMPILER:
            return self._torch
        if name == _ALGEBRA and importer == _ASKS_ALGEBRA:
            return _NoAlgebra
        if name == _SYMBOLS and names and all(one in _ON_NUMBERS for one in names):
            return self._symbols
        return None

    def replacements(self, is_here: Callable[[], bool]) -> Replacements:
        """Return what gives stand-ins where ``is_here()`` is true, until the compiler is imported,
        and with it all that it imports.
        """
        if COMPILER in sys.modules:
            return []
        original = builtins.__import__

        # Its parameters have the names of those of ``__import__``: some give them by name.
        def import_(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Any = None,
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            __tracebackhide__ = True  # an import that fails is the program's own
            if locals is None and name not in sys.modules:
                instead = self.stand_in(name, globals, fromlist) if is_here() else None
                if instead is not None:
                    return instead
            return original(name, globals, locals, fromlist, level)

        return [(builtins, {"__import__": import_})]

    def forget(self) -> None:
        """Let functions that were called meanwhile ask the compiler when they are called again."""
        while self._disabled:
            vars(self._disabled.pop()).pop(_DISABLED, None)


def _on_numbers(name: str, kinds: tuple[type, ...], plain: Callable[..., Any]) -> Any:
    """Return ``plain`` for numbers of these types, and torch's own function for anything else."""

    def function(*given: Any, **named: Any) -> Any:
        if not named and all(type(one) in kinds for one in given):
            return plain(*given)
        return getattr(import_module(_SYMBOLS), name)(*given, **named)

    return function


def _equal(one: Any, other: Any) -> Any:
    """Return whether two sizes, or shapes, are the same; ``sym_eq``."""
    shapes = isinstance(one, tuple | list) and isinstance(other, tuple | list)
    sizes = [*one, *other] if shapes else [one, other]
    if all(type(size) is int for size in sizes):
        return [*one] == [*other] if shapes else one == other
    return import_module(_SYMBOLS).sym_eq(one, other)


def _itself(given: Any) -> Any:
    return given


_NUMBERS = (bool, int, float)
#: As they are in torch/fx/experimental/symbolic_shapes.py for what is no symbol.
_ON_NUMBERS: dict[str, Any] = {
    "expect_true": _on_numbers("expect_true", (bool,), _itself),
    "guard_int": _on_numbers("guard_int", (int,), _itself),
    "guard_or_false": _on_numbers("guard_or_false", (bool,), _itself),
    "guard_or_true": _on_numbers("guard_or_true", (bool,), _itself),
    "guard_size_oblivious": _on_numbers("guard_size_oblivious", (bool,), _itself),
    "guarding_hint_or_throw": _on_numbers("guarding_hint_or_throw", (bool, int), _itself),
    "has_guarding_hint": _on_numbers("has_guarding_hint", _NUMBERS, lambda given: True),
    "is_nested_int": _on_numbers("is_nested_int", _NUMBERS, lambda given: False),
    "statically_known_true": _on_numbers("statically_known_true", (bool,), _itself),
    "sym_eq": _equal,
    "sym_and": _on_numbers("sym_and", (bool,), lambda *given: reduce(and_, given)),
    "sym_or": _on_numbers("sym_or", (bool,), lambda *given: reduce(or_, given)),
}
