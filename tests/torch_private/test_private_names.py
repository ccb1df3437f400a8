"""Private names of torch are declared once, in ``torch_private/``, and used nowhere else."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data.dataloader
from torch import nn

import pytest_torchmem
from pytest_torchmem import trace
from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private import names
from pytest_torchmem.torch_private.patches import replaced
from tests.processes import run_program

PACKAGE = Path(pytest_torchmem.__file__).parent
OF_TORCH = "torch_private/**/*.py"

#: Private names that stand elsewhere, and why they may.
EXCEPTIONS = {
    # Declared in torch_private/, and read in place by what runs for every operator or storage: a
    # function that reads them takes longer than all of the look-up.
    ("*", "_cdata"),
    # Not torch's, but set by the package on an object of torch, or of Python.
    ("*", "_asdict"),
    ("*", "_is_owned"),
    # An argument by name, of a class that torch_private/ declares.
    ("fake_cuda/api/factories.py", "_fake_device"),
    ("*", "_getframe"),
    ("*", "_replace"),
    ("*", "_fields"),
    ("*", "_field_defaults"),
    ("step/imports.py", "_current_frames"),  # of sys
    ("tracing/holders.py", "_current_frames"),
    ("interception/refusals.py", "_cpu"),  # in what kernels call themselves
    ("step/imports.py", "_find_and_load"),
    # Answers of functions of torch.cuda, by name: those that a torch does not have are passed over.
    ("fake_cuda/api/session.py", "_exchange_device"),
    ("fake_cuda/api/session.py", "_maybe_exchange_device"),
    ("fake_cuda/api/session.py", "_sleep"),
    ("fake_cuda/api/torch_cuda.py", "_record_memory_history"),
    ("fake_cuda/api/torch_cuda.py", "_set_allocator_settings"),
    ("fake_cuda/api/torch_cuda.py", "_snapshot"),
    ("step/imports.py", "torch.testing._internal"),  # how names of modules begin
    # Of bitsandbytes, not of torch.
    ("fake_cuda/libraries.py", "_instance"),
    ("operators/third_party/bitsandbytes.py", "_ops"),
    # Of triton's interpreter, and of Python's copy.
    ("fake_cuda/triton.py", "_interpreter"),
    ("fake_cuda/triton.py", "_patch_lang"),
    # Of pytest: the test that a fixture is set up for, and what makes its fixtures' values anew.
    ("plugin/standing.py", "_pyfuncitem"),
    ("plugin/standing.py", "_initrequest"),
    ("plugin/failure.py", "_AssertRaisesContext"),  # of unittest
    ("journal/contents.py", "_slotnames"),  # of copyreg
    # A folder of torch's: where frames are from.
    ("interception/attribution.py", "_functorch"),
    # A namespace of operators.
    ("operators/distributed/collectives.py", "_c10d_functional"),
    # Asked of sys.modules alone: whether the compiler is imported.
}
#: What declares one in ``torch_private/``.
DECLARING = {"dispatch_key", "optional", "private", "private_attribute", "private_if_imported"}
DECLARING |= {"private_name", "private_name_if_imported", "Replaceable"}
#: The beginning of names that are listed, a function of Python, and a mark that torch looks for.
_NOT_DECLARED = {"_saved_", "_getframe", "_boxed_call"} | {
    "_cuda_getCurrentRawStream",  # builds without CUDA lack them
    "_host_emptyCache",
}
_OF_CUDA_BUILDS = ("_accelerator_get", "_cuda_")
_PRIVATE = re.compile("_[^_]")
_PATH = re.compile(r"torch\.(\w+\.)*_[a-z]\w*(\.\w+)*|_(raw_)?saved_\w*")


@cache
def _names_of_torch() -> frozenset[str]:
    """Return private attributes of what a trace deals with, but for operators of ATen."""
    owners: tuple[Any, ...] = (
        *(torch, torch._C, torch._C._nn, torch.autograd.graph.Node, torch.cuda, torch.cuda.memory),
        *(torch.Generator, torch.Tensor, torch.UntypedStorage, nn.Module()),
        torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
    )
    found = {name for owner in owners for name in dir(owner) if _PRIVATE.match(name)}
    registered = torch._C._dispatch_get_all_op_names()
    operators = {name.partition("::")[2].partition(".")[0] for name in registered}
    return frozenset(found - operators)


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names in a module that are not its own: torch's, or Python's."""
    own = _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _PRIVATE.match(node.attr):
            root = ast.unparse(node.value)
            if (
                root not in ("self", "cls")
                and not re.search(r"\b_?(torch\.ops\.)?aten$", root)
                and (node.attr not in own or root.startswith("torch"))
            ):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from _private_parts(f"{node.module}", *[alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            yield from _private_parts(*[a.name for a in node.names if a.name.startswith("torch")])
        elif isinstance(node, ast.keyword) and node.arg in _names_of_torch():
            yield str(node.arg)
        elif isinstance(node, ast.Constant):
            text = str(node.value)
            if text in _names_of_torch() or _PATH.fullmatch(text):
                yield text


def _private_parts(*paths: str) -> list[str]:
    return [part for path in paths for part in path.split(".") if _PRIVATE.match(part)]


def _own_names(tree: ast.AST) -> set[str]:
    """Return what a module defines, and the attributes that its classes set."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("self."):
            found.add(node.attr)
    return found


@cache
def _parsed(pattern: str = "*.py") -> list[tuple[str, ast.AST]]:
    return [
        (path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob(pattern))
    ]


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import torch._C", ["_C"]),
        ("from torch._ops import x", ["_ops"]),
        ("from torch.utils.data import _utils", ["_utils"]),
        ("torch.cuda._lazy_init()", ["_lazy_init"]),
        ("from torch import nn\nnn.Module._apply(m)", ["_apply"]),
        ("tensor.untyped_storage()._cdata", ["_cdata"]),
        ("getattr(tensor, '_base')", ["_base"]),
        ("{'_parse_to': f}", ["_parse_to"]),
        ("replaced(torch.cuda, _lazy_init=f)", ["_lazy_init"]),
        ("sys.modules['torch.distributed._x.y']", ["torch.distributed._x.y"]),
        ("'_softmax', torch.ops.aten._softmax.default, self._x, _y, __z__", []),
        ("class A:\n    def __init__(self): self._x = 1\n    def f(self, other): other._x", []),
    ],
)
def test_what_is_found(program: str, found: list[str]) -> None:
    assert list(private_names(ast.parse(program))) == found


def test_private_names_stand_in_torch_private_alone() -> None:
    found = {
        (path, name)
        for path, tree in _parsed()
        if not path.startswith("torch_private/")
        for name in private_names(tree)
        # Builds with CUDA have these, and only of them is such a name one of torch's.
        if not name.startswith(_OF_CUDA_BUILDS)
    }
    anywhere = {name for path, name in EXCEPTIONS if path == "*"}
    used = {("*", name) if name in anywhere else (path, name) for path, name in found}
    assert used == EXCEPTIONS


_TEXTS = (ast.Constant, ast.JoinedStr)


def _declared() -> Iterator[str]:
    """Yield the paths that ``torch_private/`` declares."""
    for _, tree in _parsed(OF_TORCH):
        known: dict[str, str] = {}  # what begins several paths
        for node in ast.walk(tree):
            with suppress(NameError):  # of a path that is made in a loop
                if isinstance(node, ast.Assign) and isinstance(node.value, _TEXTS):
                    known[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), {**known})
                elif (
                    isinstance(node, ast.Call)
                    and ast.unparse(node.func).split(".")[-1] in DECLARING
                ):
                    yield str(eval(ast.unparse(node.args[0]), {**known}))


def test_a_private_name_is_declared_once() -> None:
    declared = Counter(_declared())
    assert len(declared) > 80
    assert [path for path, count in declared.items() if count > 1] == []


def test_what_torch_private_uses_is_declared() -> None:
    parts = {part for path in _declared() for part in path.split(".")}
    for path, tree in _parsed(OF_TORCH):
        types = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for name in private_names(node)
        }
        used = {name.split(".")[-1] for name in private_names(tree)}
        assert used - types <= parts | _NOT_DECLARED, path


def test_every_name_is_there() -> None:
    trace(nn.Linear(2, 2), torch.ones(1, 2), device="cuda")
    assert len(names.DECLARED) > 80
    assert names.missing_names() == []


def test_what_is_missing_is_listed_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "DECLARED", dict(names.DECLARED))
    found = names.private("torch._C._gone"), names.private("torch._nowhere.at_all")
    names.dispatch_key("Gone")
    names.private_attribute("torch.nn.Module._gone")
    with pytest.raises(UnsupportedTorchError, match=r"cannot trace on torch \d") as raised:
        trace(nn.Linear(2, 2), torch.ones(1, 2))
    message = str(raised.value)
    missing = "dispatch key Gone, torch._C._gone, torch._nowhere.at_all, torch.nn.Module._gone"
    assert f"it has no {missing}. " in message
    assert "2.11 to 2.15" in message
    assert "\n" not in message
    for missing_name in found:
        with pytest.raises(UnsupportedTorchError, match=r"it has no torch\._"):
            missing_name(1)


def test_a_class_may_derive_from_what_is_missing() -> None:
    class Derived(names.MissingName("torch._gone")):  # type: ignore[misc]
        pass

    assert Derived.__mro__ == (Derived, object)


def test_names_of_modules_that_few_import() -> None:
    assert names.private_if_imported("torch._not_imported.Kind")() is None
    assert names.private_if_imported("torch._C.DispatchKey")() is torch._C.DispatchKey
    del names.DECLARED["torch._not_imported.Kind"], names.DECLARED["torch._C.DispatchKey"]


def test_names_that_only_calls_make_and_modules_that_functions_hide() -> None:
    context = "torch._dynamo.eval_frame._TorchDynamoContext"
    assert names.is_named(f"{context}.compile_wrapper")
    assert not names.is_named(f"{context}.gone")
    assert not names.is_named("torch._dynamo.gone.compile_wrapper")
    hidden = "torch._higher_order_ops.flex_attention"
    assert names.find(f"{hidden}.sdpa_dense").__module__ == hidden
    assert isinstance(names.find(f"{hidden}.gone"), names.MissingName)


@pytest.mark.parametrize("attributes", [{"gone": len}, {"value": len}, {"function": 1}])
def test_what_is_replaced_must_be_there(attributes: dict[str, Any]) -> None:
    class Owner:
        value, function = 1, len

    unsupported = pytest.raises(UnsupportedTorchError, match=r"has no .* that can be replaced")
    with unsupported, replaced(Owner, **attributes):
        pass
    assert (Owner.value, Owner.function) == (1, len)
    assert not hasattr(Owner, "gone")


def test_a_torch_without_any_of_them_is_no_error_until_the_first_trace() -> None:
    program = """
import importlib, pkgutil
import pytest_torchmem
from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private import names
names.find = names.MissingName
for module in pkgutil.walk_packages(pytest_torchmem.__path__, "pytest_torchmem."):
    if "integrations." not in module.name:  # of libraries that may not be installed
        importlib.import_module(module.name)
try:
    pytest_torchmem.trace(lambda: None)
except UnsupportedTorchError as error:
    print(error)
"""
    said = run_program(program).stdout
    assert "dispatch key Fake" in said
    assert said.count("torch._C._") > 40
