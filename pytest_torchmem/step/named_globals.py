"""Global variables that a function names, for a function that finds others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from pytest_torchmem.step.reached import codes_of, is_of_others, written_by


def named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the models and tensors among the global variables that a function of the program
    names, and the functions of its own file, which may name others.

    Nothing of a function that binds global variables: it has to find what it has bound.
    """
    if is_of_others(function):
        return {}
    variables, codes = function.__globals__, list(codes_of(function.__code__))
    if any(map(written_by, codes)):
        return {}
    named = {name: variables[name] for code in codes for name in code.co_names if name in variables}
    return {name: one for name, one in named.items() if _counts(one, variables)}


def _counts(one: Any, variables: Mapping[str, Any]) -> bool:
    if type(one) is FunctionType:
        return one.__globals__ is variables
    return isinstance(one, (nn.Module, Tensor))


class Globals(dict[str, Any]):
    """The global variables of a function, of which some are others than in its module."""

    def __init__(self, module: dict[str, Any]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]
