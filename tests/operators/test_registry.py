"""Every record speaks of operators that torch has, of arguments they have, and can be asked."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims  # makes prims::fma

from pytest_torchmem.operators.calls import Binding, Unbindable
from pytest_torchmem.operators.registry import (
    DEVICES,
    EVERY,
    OperatorKind,
    OperatorRecord,
    load,
    operator,
    record_of,
    records,
)
from pytest_torchmem.operators.spec import OperatorSpec, spec_of

load()
FUNCTIONS = ("meta", "check", "workspace", "decomposition", "path", "nested", "storages", "values")
FUNCTIONS += ("flops", "sparse", "compressed")
OF_EVERY_OVERLOAD = ("meta", "check", "workspace", "sparse", "flops")


def overloads(name: str) -> list[Any]:
    """Return the overloads that a record speaks of: one, or those of its name."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        return []
    if overload:
        return [getattr(packet, overload)] if overload in packet.overloads() else []
    return [found for one in packet.overloads() if (found := _dispatched(packet, one)) is not None]


def _dispatched(packet: Any, name: str) -> Any:
    """Return an overload, ``None`` for one of TorchScript's own that has no kernels."""
    overload = getattr(packet, name)
    try:
        spec_of(overload)
    except RuntimeError:
        return None
    return overload


def is_asked(spec: OperatorSpec, aspect: str, device: str) -> bool:
    """Return whether a trace can come to ask for an aspect of an overload on a device."""
    if aspect in ("check", "path", "nested", "sparse", "compressed", "flops"):
        return True
    if spec.kind is not OperatorKind.LEAF and not spec.one_kernel_on(device):
        checks = spec.kind is OperatorKind.PASS and aspect == "decomposition"
        return checks or spec.kind in (OperatorKind.NESTED, OperatorKind.COMPRESSED)
    runs_body = spec.composite and not spec.one_kernel_on(device) and bool(spec.tensors)
    if aspect == "decomposition":
        return True
    if aspect == "values":  # of what runs a body, too: KnownValues.ahead_of_body
        return not runs_body
    return not runs_body and spec.on(device).decomposition is None


def test_torch_has_the_operators() -> None:
    missing = [name for name in sorted(records()) if not overloads(name)]
    assert missing == [], f"torch {torch.__version__} has none of them"


def every_function() -> Iterator[tuple[OperatorRecord, str, str, Callable[..., Any]]]:
    for name in sorted(records()):
        record = record_of(name)
        for aspect in FUNCTIONS:
            for device, function in getattr(record, aspect).items():
                yield record, aspect, device, function


def test_every_aspect_can_be_asked_for() -> None:
    never = [
        (record.name, aspect, device)
        for record, aspect, device, _ in every_function()
        if not asked_overloads(record, aspect, device)
    ]
    assert never == []


def test_functions_name_arguments_of_the_schema() -> None:
    for record, aspect, device, function in every_function():
        for overload in asked_overloads(record, aspect, device):
            Binding(function, overload)


def asked_overloads(record: OperatorRecord, aspect: str, device: str) -> list[Any]:
    """Return the overloads that an aspect holds for, and that a trace can ask it of."""
    on = [device] if device != EVERY else list(DEVICES)
    every = aspect in OF_EVERY_OVERLOAD or "." in record.name
    return [
        one
        for one in overloads(record.name)
        if every or one._overloadname == "default"
        if any(is_asked(spec_of(one), aspect, where) for where in on)
    ]


def test_parameters_are_used() -> None:
    unused = [
        (function.__qualname__, parameter)
        for function in {function for *_, function in every_function()}
        for parameter in inspect.signature(function, follow_wrapped=False).parameters
        if not hasattr(function, "__signature__") and parameter not in _loaded(function.__code__)
    ]
    assert unused == []


def _loaded(code: Any) -> set[str]:
    """Return the variables that a function, or one inside of it, reads."""
    import dis

    found = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("LOAD", "STORE_DEREF", "COPY_FREE"))
    }
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found |= _loaded(constant)
    names: set[str] = set()
    for one in found:
        names |= set(one) if isinstance(one, tuple) else {one}
    return names


def test_functions_say_where_they_come_from() -> None:
    for function in {function for *_, function in every_function()}:
        module = inspect.getmodule(function)
        says = function.__doc__ or (function.__name__ == "<lambda>" and "a comment above it does")
        assert says, f"{function.__qualname__} says nothing"
        text = (module.__doc__ or "") + says + inspect.getsource(module)
        assert any(ending in text for ending in (".cu", ".cpp", ".h")), function


def test_an_aspect_is_registered_once() -> None:
    with pytest.raises(ValueError, match="aten::mm has another workspace on cuda already"):
        operator("aten::mm").workspace("cuda")(lambda: 0)
    with pytest.raises(ValueError, match="aten::geqrf has another meta on every device already"):
        operator("aten::geqrf").meta()(lambda: None)
    with pytest.raises(ValueError, match="aten::lu_unpack has another decomposition"):
        operator("aten::lu_unpack").decomposition()(lambda: None)
    with pytest.raises(ValueError, match="aten::resize_ has another kind already"):
        operator("aten::resize_", kind=OperatorKind.LEAF)


def test_arguments_are_bound_by_name() -> None:
    def told(input: Any, alpha: Any, other: Any = None, machine: Any = None) -> Any:
        return input, alpha, other, machine

    binding = Binding(told, torch.ops.aten.add.Tensor)
    assert binding((1, 2), {}, machine="host") == (1, 1, 2, "host")
    assert binding((1, 2), {"alpha": 3}, machine="host") == (1, 3, 2, "host")
    with pytest.raises(Unbindable, match="aten::mm has no argument 'weight'"):
        Binding(lambda weight: 0, torch.ops.aten.mm.default)
    with pytest.raises(Unbindable, match="name what it uses"):
        Binding(lambda *arguments: 0, torch.ops.aten.mm.default)
