"""What records give for a call that a test writes down."""

from typing import Any

import torch
from torch._ops import OpOverload

from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace import Workspace, as_workspace
from pytest_torchmem.operators.workspace_of import workspace_function
from pytest_torchmem.targets.gpus import Gpu


def overload_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload:
    """Return the first overload of an operator that takes as many arguments of these names."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    for one in packet.overloads():
        try:
            overload: OpOverload = getattr(packet, one)
        except RuntimeError:  # of Python's own lists and strings
            continue
        schema = overload._schema.arguments
        positional = [argument for argument in schema if not argument.kwarg_only]
        names = {argument.name for argument in schema}
        fits = len(args) <= len(positional) and kwargs.keys() <= names
        if fits and all(_fits(one, given) for one, given in zip(positional, args, strict=False)):
            return overload
    raise AssertionError(f"no overload of {name} takes {len(args)} arguments and {[*kwargs]}")


def _fits(argument: Any, given: Any) -> bool:
    wanted = str(argument.type)
    if isinstance(given, torch.Tensor):
        return wanted in ("Tensor", "Optional[Tensor]")
    if isinstance(given, bool):
        return wanted in ("bool", "Optional[bool]", "number", "Optional[number]")
    if isinstance(given, (list, tuple)):
        return wanted.startswith(("List", "Optional[List"))
    return "Tensor" not in wanted or given is None or wanted == "Optional[Tensor]"


def workspace_of(name, machine, outputs, *args, **kwargs) -> Workspace:
    device = "cuda" if isinstance(machine, Gpu) else "cpu"
    spec = spec_of(overload_of(name, args, kwargs))
    function = workspace_function(spec, device)
    assert function is not None, f"{name} has no workspace on {device}"
    return as_workspace(function(args, kwargs, machine=machine, outputs=outputs, cudnn=None), name)
