"""A step at other sizes, from one that is given: its tensors made longer along a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.graphs.scaling import Scaling, scaling
from pytest_torchmem.step.step import Step
from pytest_torchmem.step.trees import tensors_in

DIMENSIONS = {"batch": 0, "sequence": 1}
"""Which dimension of its input tensors a module means by a size."""
_MULTIPLES = (1, 2, 3)


def scaling_of(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int]] | None = None,
    **options: Any,
) -> Scaling:
    """Return how a step grows with the sizes ``names``.

    A module's inputs are made longer: ``"batch"`` is their dimension 0 and ``"sequence"`` their
    dimension 1, of those that are as long there as the first tensor. ``sizes`` has other values
    than its own length, twice and three times that. A callable is called with a value of each of
    ``sizes``, by name, and returns a module with its arguments. ``options`` go to ``trace``.
    Raises ``UsageError`` for sizes that are not known.
    """
    if not isinstance(target, nn.Module):
        missing = sorted(set(names) - set(sizes or ()))
        if missing:
            raise UsageError(
                f"a function needs values of {', '.join(missing)}: "
                f'sizes={{"{missing[0]}": [256, 512, 1024]}}'
            )
        given: dict[str, Any] = dict(sizes or {})
        return scaling(lambda **at: target(*args, **at), options=options, **given)
    step, own = Step.taken_from(kwargs)
    known = {name: _length(name, args, own) for name in names}
    values: dict[str, Any] = {name: [known[name] * times for times in _MULTIPLES] for name in names}
    values |= {name: list(given) for name, given in (sizes or {}).items() if name in known}

    def build(**at: int) -> tuple[Any, ...]:
        lengths = {DIMENSIONS[name]: (known[name], value) for name, value in at.items()}
        longer = resized((args, own), lengths)
        return (target, *longer[0], longer[1])

    return scaling(build, options={**step.options(), **options}, **values)


def _length(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    dimension = DIMENSIONS.get(name)
    if dimension is None:
        raise UsageError(
            f"{name!r} is no size of a module's inputs: expected one of {', '.join(DIMENSIONS)}; "
            "pass a function of the sizes instead of the module, with sizes="
        )
    for tensor in tensors_in((args, kwargs)):
        if tensor.dim() > dimension:
            return int(tensor.shape[dimension])
    raise UsageError(f"none of the inputs has a dimension {dimension}, which is the {name}")


def resized(value: Any, lengths: Mapping[int, tuple[int, int]]) -> Any:
    """Return nested tensors made longer: of each dimension, those of one length have another."""
    if isinstance(value, Tensor):
        for dimension, (before, now) in lengths.items():
            if value.dim() > dimension and value.shape[dimension] == before and now != before:
                positions = torch.arange(now, device=value.device) % before
                grad = value.requires_grad
                value = value.detach().index_select(dimension, positions).requires_grad_(grad)
        return value
    if isinstance(value, dict):
        return {key: resized(item, lengths) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resized(item, lengths) for item in value)
    return value
