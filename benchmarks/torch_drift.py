"""What a newer torch does otherwise than the one that pytest-torchmem was written against.

python -m benchmarks.torch_drift             compare the installed torch with torch_drift.json
python -m benchmarks.torch_drift --write     describe the installed torch there

Prints private names, and functions that stand in for those of a GPU, that are gone or take other
arguments; operators that the package names and torch has no more or with other arguments; and
operators that are composite, structured, a view, or have a kernel for meta or a decomposition in
Python where they had none, or the other way round.
Exits with 1 where anything is. Meant for torch's nightly builds, in an environment of their own:

pip install --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
"""

import argparse
import ast
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._decomp import decomposition_table

import pytest_torchmem
from pytest_torchmem.operators.registry import records
from pytest_torchmem.torch_private import names
from pytest_torchmem.torch_private.keys import (
    all_operators,
    find_operator,
    has_kernel,
    is_dispatched,
    is_view,
    schema,
)

DESCRIPTION = Path(__file__).with_suffix(".json")
PACKAGE = Path(pytest_torchmem.__file__).parent
Description: TypeAlias = dict[str, dict[str, str]]

_KERNELS = {
    "CPU": "cpu",
    "Meta": "meta",
    "CompositeImplicitAutograd": "implicit",
    "CompositeExplicitAutograd": "explicit",
    "CompositeExplicitAutogradNonFunctional": "structured",
    "NestedTensorCPU": "nested",
    "SparseCsrCPU": "compressed",
}
"""Dispatch keys, and what an operator with a kernel for one is called."""
_NOTHING_YET = type(None).__name__
"""The shape of a variable that torch sets later, which tells nothing of what it will be."""
_OF_PYTHON = ("($self, /)", "($self, object, /)", "(object, /)")
"""What Python 3.13 and later write themselves for functions of C++ that say nothing."""
_NAMED = re.compile(r"aten::\w+(\.\w*)?")


def describe() -> Description:
    """Describe the installed torch: names and arguments, and kernels of ATen's operators."""
    operators = {
        name: operator
        for name in sorted(all_operators())
        if name.startswith("aten::")
        and (operator := find_operator(name.removeprefix("aten::"))) is not None
        and is_dispatched(operator.name())
        and not any(argument.is_out for argument in schema(operator).arguments)
    }
    import_package()
    private = {path for path in names.DECLARED if path.startswith("torch.")} - {*missing_names()}
    described = {}
    for name, operator in operators.items():
        kernels = [word for key, word in _KERNELS.items() if has_kernel(operator.name(), key)]
        kernels += ["view"] if is_view(operator) else []
        kernels += ["decomposition"] if operator in decomposition_table else []
        arguments = " ".join(argument.name for argument in schema(operator).arguments)
        described[name] = f"{arguments} | {' '.join(kernels)}"
    return {
        "private names": {
            path: _shape(names.DECLARED[path] or _found(path)) for path in sorted(private)
        },
        "replaced functions": replaced_functions(),
        "operators": described,
    }


def missing_names() -> list[str]:
    """Return the private names that torch does not have, those of rare modules included."""
    later = [path for path, found in names.DECLARED.items() if found is None]
    absent = [
        path
        for path in later
        if isinstance(names.find(path), names.MissingName) and not names.is_named(path)
    ]
    return sorted([*names.missing_names(), *absent])


def import_package() -> list[str]:
    """Import every module of the package; return what could not be imported, and why."""
    failed = []
    for module in pkgutil.walk_packages([str(PACKAGE)], f"{PACKAGE.name}."):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and ".integrations." in module.name:
                continue  # of a library that is not installed
            failed.append(f"{module.name} cannot be imported: {type(error).__name__}: {error}")
    return failed


def _found(path: str) -> Any:
    """Return what a name stands for; the name itself where only instances or calls have it."""
    found = names.find(path)
    return path.rpartition(".")[2] if isinstance(found, names.MissingName) else found


def replaced_functions() -> dict[str, str]:
    """Return the functions of torch that a trace on fake cuda answers for, and their parameters."""
    found = {}

    def look() -> None:
        from pytest_torchmem.fake_cuda.api.torch_cuda import API

        for module, functions in API.functions:
            for name in functions:
                function = getattr(module, name, None)
                if function is not None:
                    found[f"{module.__name__}.{name}"] = _shape(function.__wrapped__)

    with suppress(Exception):  # ``drift`` says why
        pytest_torchmem.trace(look, device="cuda")
    return found


def _shape(found: Any) -> str:
    """Return the parameters of a function, or the type of anything else."""
    if not callable(found):
        return type(found).__name__
    if isinstance(found, type) and issubclass(found, Enum):
        return Enum.__name__  # whose arguments differ between versions of Python
    try:
        if getattr(found, "__text_signature__", None) in _OF_PYTHON:
            raise ValueError
        return " ".join(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # of C++: pybind11 writes the signature into the docstring
        first = (found.__doc__ or "").strip().partition("\n")[0]
        written = re.findall(r"[(,] ?(\w+):", first)
        return " ".join(written) if "->" in first else type(found).__name__


@cache
def named_operators() -> set[str]:
    """Return the operators of ATen that the package names, with an overload or without."""
    import_package()
    found = {name for name in records() if _NAMED.fullmatch(name)}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and _NAMED.fullmatch(str(node.value)):
                found.add(str(node.value))
            elif isinstance(node, ast.Attribute):
                named = re.fullmatch(r"(?:torch\.ops\.|_?)aten\.(\w+)\.(\w+)", ast.unparse(node))
                if named is not None:
                    found.add(f"aten::{named[1]}.{named[2]}".removesuffix(".default"))
    return found


def drift(before: Mapping[str, Mapping[str, str]], named: set[str]) -> list[str]:
    """Return what is otherwise than described, a line each; ``named`` are the package's."""
    found = [*import_package(), *[f"gone: {path}" for path in missing_names()]]
    refused = []
    for device in ("cpu", "cuda"):
        try:
            pytest_torchmem.trace(nn.Linear(2, 2), torch.ones(1, 2), device=device)
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    found += dict.fromkeys(refused)
    now = describe()
    for path, shape in before["private names"].items():
        shape_now = now["private names"].get(path, shape)
        if _NOTHING_YET not in (shape, shape_now):
            found += _changed(f"{path} takes", shape, shape_now)
    for path, shape in before["replaced functions"].items():
        found += _changed(f"{path} takes", shape, now["replaced functions"].get(path, shape))
        found += [f"gone: {path}"] if isinstance(names.find(path), names.MissingName) else []
    bases = {name.partition(".")[0] for name in named}
    for name, described in before["operators"].items():
        is_named = name.partition(".")[0] in bases
        if name not in now["operators"]:
            found += [f"gone: {name}"] if is_named else []
            continue
        arguments, _, kernels = described.partition(" | ")
        arguments_now, _, kernels_now = now["operators"][name].partition(" | ")
        found += _changed(f"{name} takes", arguments, arguments_now) if is_named else []
        found += _changed(f"{name} has", kernels, kernels_now)
    new = sorted(set(now["operators"]) - set(before["operators"]))
    return found + [f"new: {name} ({now['operators'][name]})" for name in new]


def _changed(what: str, before: str, now: str) -> list[str]:
    return [] if before == now else [f"{what}: {now or 'nothing'}, before: {before or 'nothing'}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what has drifted; return 1 where something has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="describe the installed torch")
    parser.add_argument("--description", type=Path, default=DESCRIPTION, help="the file")
    options = parser.parse_args(arguments)
    if options.write:
        described = {"torch": torch.__version__.partition("+")[0], **describe()}
        options.description.write_text(json.dumps(described, indent=0) + "\n", encoding="utf-8")
        return 0
    before = json.loads(options.description.read_text(encoding="utf-8"))
    found = drift(before, named_operators())
    for line in found:
        print(line)
    print(f"torch {torch.__version__} against {before['torch']}: {len(found)} differences")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
