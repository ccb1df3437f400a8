"""The samples: torch's own inputs for its operators and modules, as steps to trace and measure."""

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any
from unittest import mock

import torch

from benchmarks.isolation.sample import NothingToDifferentiate, Sample
from pytest_torchmem.step.trees import replace_leaves, tensors_in

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
    "int64": torch.int64,
    "bool": torch.bool,
}
USUAL_DTYPES = ("float32", "bfloat16")
LAYOUTS = ("contiguous", "channels_last")
EDGES = ("special", "masked", "ties", "expanded", "strided", "empty", "broadcast", "scalar")
"""Samples whose tensors are changed: infinities and NaN, rows that a mask hides, equal elements,
zero strides, gaps, no elements, dimensions of one element, no dimensions."""
MODES = ("no_grad", "autocast", "forward_ad", "twice")
"""Samples run otherwise: without a gradient, in lower precision, with tangents, with the gradients
of gradients."""
VARIANTS = ("function", "inplace", "out")
_DENSE = (torch.Tensor, torch.nn.Parameter)
_Change = Callable[[torch.Tensor], torch.Tensor]
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, slots=True)
class Unit:
    """All samples of one operator or module for one dtype and layout."""

    suite: str
    """``"op"`` for an ``OpInfo``, ``"module"`` for a ``ModuleInfo``."""
    name: str
    dtype: str
    layout: str
    variant: str = "function"

    @property
    def case(self) -> str:
        """Return the unit's name within a run."""
        return f"{self.suite}:{self.name}:{self.dtype}:{self.layout}:{self.variant}"


def units(
    pattern: str = "",
    suites: Sequence[str] = ("op", "module"),
    dtypes: Sequence[str] = USUAL_DTYPES,
    layouts: Sequence[str] = LAYOUTS,
    variants: Sequence[str] = ("function",),
) -> list[Unit]:
    """Return the units whose operator's name has a match of the regular expression ``pattern``."""
    search = re.compile(pattern).search
    found: list[Unit] = []
    for suite in suites:
        for name, info in _database(suite).items():
            if not search(name):
                continue
            for dtype in dtypes:
                if not _supports(suite, info, DTYPES[dtype]):
                    continue
                for layout in layouts:
                    found.extend(
                        Unit(suite, name, dtype, layout, variant)
                        for variant in variants
                        if _has(info, variant)
                    )
    return found


def _has(info: Any, variant: str) -> bool:
    attribute = {"inplace": "inplace_variant", "out": "supports_out"}.get(variant)
    return attribute is None or bool(getattr(info, attribute, None))


def samples(unit: Unit, limit: int = 0) -> Iterator[Sample]:
    """Yield the unit's samples, or ``limit`` of them spread evenly; the same ones every time."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    info = _database(unit.suite)[unit.name]
    make = _operator_samples if unit.suite == "op" else _module_samples
    with (
        # Before each sample torch looks for a test in the stack, and seeds generators of devices
        # that are not there, which formats the stack for each: most of what samples would cost.
        mock.patch.object(common_utils, "extract_test_fn", return_value=None),
        mock.patch.object(core, "extract_test_fn", return_value=None),
        mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed),
    ):
        random.seed(0)
        torch.manual_seed(0)
        made = list(islice(make(info, unit), 1 if limit == 1 else None))
    if limit and len(made) > limit:
        made = [made[position * len(made) // limit] for position in range(limit)]
    yield from made


@cache
def _database(suite: str) -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    if suite == "module":
        return {info.name: info for info in module_db}
    names = [(op.name, op.variant_test_name) for op in op_db]
    return {
        f"{name}.{variant}" if variant else name: op
        for (name, variant), op in zip(names, op_db, strict=True)
    }


def _supports(suite: str, info: Any, dtype: torch.dtype) -> bool:
    if suite == "op":
        return dtype in info.supported_dtypes("cpu")
    # Modules list the dtypes their own tests use; a step that cannot run is skipped anyway.
    return any(listed.is_floating_point for listed in info.dtypes)


def _operator_samples(op: Any, unit: Unit) -> Iterator[Sample]:
    dtype = DTYPES[unit.dtype]
    with_grad = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    in_place = unit.variant == "inplace"
    function = op.inplace_variant if in_place else op.op
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=with_grad)):
        if in_place and sample.broadcasts_input:
            continue
        inputs = (sample.input, sample.args, sample.kwargs)
        inputs, changed = _changed(inputs, _CHANGES.get(unit.layout))
        if not changed:
            continue
        program = OperatorStep(function, sample.output_process_fn_grad, unit.variant)
        yield Sample(index, program, inputs, {}, {"loss_fn": real_sum}, geometry(inputs))


def _module_samples(info: Any, unit: Unit) -> Iterator[Sample]:
    dtype = DTYPES[unit.dtype]
    index = -1
    for training in (True, False):
        made = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for sample in made:
            index += 1
            if sample.forward_input is None:
                continue
            constructor, forward = sample.constructor_input, sample.forward_input
            module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype)
            module.train(training)
            inputs = (forward.args, forward.kwargs)
            inputs, changed = _changed(inputs, _CHANGES.get(unit.layout))
            if not changed:
                continue
            if unit.layout == "channels_last":
                for parameter in module.parameters():
                    layout = _CHANNELS_LAST.get(parameter.dim())
                    if layout is not None:
                        parameter.data = parameter.data.contiguous(memory_format=layout)
            detail = f"{'train' if training else 'eval'} {module} {geometry(inputs)}"
            yield Sample(index, module, tuple(inputs[0]), inputs[1], {"loss_fn": real_sum}, detail)


class OperatorStep(torch.nn.Module):
    """One operator as a module, so that its tensors are the inputs of a training step."""

    def __init__(
        self, function: Callable[..., Any], process: Callable[[Any], Any], variant: str
    ) -> None:
        super().__init__()
        self._function = function
        self._process = process
        self._variant = variant

    def forward(self, first: Any, rest: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return what can be differentiated of the operator's result.

        An in-place operator works on a copy, since a leaf that requires grad cannot be changed.
        What is written to ``out=`` has no gradient.
        """
        if self._variant == "inplace":
            first = first.clone()
        if self._variant == "out":
            with torch.no_grad():
                made = self._function(first, *rest, **options)
                made = tuple(made) if isinstance(made, tuple) else made
                options = {**options, "out": replace_leaves(made, torch.Tensor, _with_gaps)}
                return self._function(first, *rest, **options)
        return self._process(self._function(first, *rest, **options))


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a zero tensor of the same shape, with a gap after each element."""
    return tensor.new_zeros((*tensor.shape, 2))[..., 0]


def real_sum(output: Any) -> torch.Tensor:
    """Return the sum of what can be differentiated in ``output``, complex tensors as pairs."""
    parts = [
        torch.view_as_real(tensor.resolve_conj()).sum() if tensor.is_complex() else tensor.sum()
        for tensor in tensors_in(output)
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]
    if not parts:
        raise NothingToDifferentiate
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _changed(value: Any, change: _Change | None) -> tuple[Any, bool]:
    """Return ``value`` with its dense tensors changed, and whether there is anything to compare."""
    if change is None:
        return value, True
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or type(value) not in _DENSE:
            return value, False
        with torch.no_grad():
            made = change(value)
        if made.stride() == value.stride() and torch.equal(made, value):
            return value, False
        return made.detach().requires_grad_(value.requires_grad), True
    if isinstance(value, dict):
        parts = {key: _changed(item, change) for key, item in value.items()}
        return {key: item for key, (item, _) in parts.items()}, any(c for _, c in parts.values())
    if type(value) in (list, tuple):
        found = [_changed(item, change) for item in value]
        return type(value)(item for item, _ in found), any(changed for _, changed in found)
    return value, False


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    layout = _CHANNELS_LAST.get(tensor.dim())
    if layout is None or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=layout)


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """Put infinities, NaN, zeros and the largest number at drawn places."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    most = torch.finfo(tensor.dtype).max
    made = tensor.clone().flatten()
    for value in (math.inf, -math.inf, math.nan, 0.0, -0.0, most):
        made[random.randrange(len(made))] = value
    return made.view(tensor.shape)


def _masked(tensor: torch.Tensor) -> torch.Tensor:
    """Let a mask hide a whole row, and nothing of another."""
    if not tensor.numel() or tensor.requires_grad or not tensor.dim():
        return tensor
    hidden: float
    seen: float
    if tensor.dtype is torch.bool:
        hidden, seen = random.sample((True, False), 2)
    elif tensor.is_floating_point():
        hidden, seen = -math.inf, 0.0
    else:
        return tensor
    rows = tensor.clone().reshape(-1, tensor.shape[-1])
    rows[-1], rows[0] = seen, hidden
    return rows.view(tensor.shape)


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    long = [position for position, size in enumerate(tensor.shape) if size > 1]
    return tensor.narrow(random.choice(long), 0, 1).expand_as(tensor) if long else tensor


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > 1 and random.random() < 0.5:
        return tensor.mT.contiguous().mT
    return torch.stack((tensor, tensor), -1)[..., 1]


def _one_long(tensor: torch.Tensor) -> torch.Tensor:
    long = [position for position, size in enumerate(tensor.shape) if size > 1]
    return tensor.narrow(random.choice(long), 0, 1) if long and random.random() < 0.5 else tensor


_CHANGES: dict[str, _Change] = {
    "channels_last": _channels_last,
    "special": _special,
    "masked": _masked,
    "ties": lambda tensor: tensor.round() if tensor.is_floating_point() else tensor,
    "expanded": _expanded,
    "strided": _strided,
    "empty": lambda tensor: tensor[:0] if tensor.dim() else tensor,
    "broadcast": _one_long,
    "scalar": lambda tensor: tensor.flatten()[-1] if tensor.numel() else tensor,
}


def geometry(value: Any) -> str:
    """Return the arguments as text, tensors by dtype, shape and, where unusual, strides."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        text = f"{dtype}{list(value.shape)}"
        if value.layout is not torch.strided:
            return f"{text}:{value.layout}"
        return text if value.is_contiguous() else f"{text}:strides{list(value.stride())}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={geometry(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(geometry(item) for item in value) + ")"
    return str(value)


def shard(found: Sequence[Unit], index: int, count: int) -> list[Unit]:
    """Return every ``count``-th unit, from ``index`` on."""
    return list(found[index::count])


def by_case(cases: Iterable[str]) -> list[tuple[Unit, int]]:
    """Return unit and sample index of cases such as ``"op:mm:float32:contiguous:function/3"``."""
    result = []
    for case in cases:
        unit, _, index = case.rpartition("/")
        suite, name, dtype, layout, variant = unit.split(":")
        result.append((Unit(suite, name, dtype, layout, variant), int(index)))
    return result
