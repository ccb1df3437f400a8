"""What the objects of a program hold, so that it can be run again as if for the first time.

A program may be traced several times: on each device, and once more with real values. What it
writes down in objects that it did not make itself (an optimizer's state, ``self.calls += 1``, a
list of losses, a table in a cache) would be there in the next run, with tensors of a trace that is
over.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

from torch import Tensor, nn

from pytest_torchmem.step.names import FUNCTIONS, Names
from pytest_torchmem.step.reached import (
    MAPPINGS,
    PLAIN,
    SEQUENCES,
    Reached,
    is_code,
    is_of_program,
)

_HOLD_NOTHING = (*PLAIN, *FUNCTIONS)
_QUICK = frozenset({bool, int, float, str, type(None)})
_GONE: Any = object()
"""Stands for what was there before, and is no more."""


class ProgramState:
    """The contents of all that a program can reach and change."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._before = [(place, _contents(place)) for place, _ in reached.holders]
        # Of parameters no more than weak references, or it would not be seen that they are gone.
        self._parameters = [
            (table, {name: ref(one) if one is not None else None for name, one in table.items()})
            for table in reached.parameters
        ]

    def has_let_go(self) -> bool:
        """Return whether something was lost that only what is kept here holds.

        Its memory was not freed then, as it would have been.
        """
        for place, contents in self._before:
            now = set(map(id, _parts(_contents(place))))
            gone = (one for one in _parts(contents) if id(one) not in now)
            if any(isinstance(one, Tensor) or not isinstance(one, PLAIN) for one in gone):
                return True
        return False

    def restore(self) -> None:
        """Give everything its contents back."""
        for (place, shared), (_, contents) in zip(self._reached.holders, self._before, strict=True):
            if isinstance(place, Names):
                _bind_as(place, contents)
            elif type(place) in MAPPINGS:
                if not _same(_parts(place), _parts(contents)):
                    # What a library registers as it is imported is registered once in a process.
                    kept = {key: place[key] for key in place if key not in contents}
                    kept = {key: one for key, one in kept.items() if shared and is_code(one)}
                    place.clear()
                    place.update(contents | kept)
            elif type(place) is set:
                place.clear()
                place.update(contents)
            elif not _same(list(place), contents):
                place.clear()
                place.extend(contents)
        for table, references in self._parameters:
            found = {name: held() if held else None for name, held in references.items()}
            lost = any(held and found[name] is None for name, held in references.items())
            if not lost and not _same(_parts(table), _parts(found)):
                table.clear()
                table.update(found)


class SharedState:
    """What is shared with other programs, which is to hold no tensors of a trace that is over.

    Tensors that it held before are not kept alive: a program may let go of them.
    """

    def __init__(self, reached: Reached) -> None:
        self._before = [
            (place, _weakly(_contents(place))) for place, shared in reached.holders if shared
        ]

    def let_go(self, is_made_here: Callable[[Tensor], bool]) -> None:
        """Put what was there before in the place of tensors that a trace has made."""

        def holds(one: Any) -> bool:
            return holds_tensor(one, is_made_here)

        for place, before in self._before:
            if isinstance(place, Names) or type(place) in MAPPINGS:
                _put_back(place, before, holds)
            elif any(map(holds, place)):
                kept = [one for one in place if not holds(one)]
                contents = [_there(one) for one in before]
                place.clear()
                add = place.update if type(place) is set else place.extend
                add(kept if any(one is _GONE for one in contents) else contents)


def _put_back(place: Any, before: dict[Any, Any], holds: Callable[[Any], bool]) -> None:
    now = _contents(place)
    for name in [name for name, one in now.items() if holds(one)]:
        then = _there(before[name]) if name in before else _GONE
        if isinstance(place, Names):
            if name in before:
                place.bind(name, None if then is _GONE else then)
            else:
                place.unbind(name)
        elif then is _GONE:
            del place[name]
        else:
            place[name] = then


def _bind_as(place: Names, contents: dict[str, Any]) -> None:
    now = place.read()
    for name, one in contents.items():
        if now.get(name, _GONE) is not one:
            place.bind(name, one)
    for name in now.keys() - contents.keys():
        place.unbind(name)


def holds_tensor(one: Any, is_meant: Callable[[Tensor], bool], depth: int = 3) -> bool:
    """Return whether something is a tensor that is meant, or holds one, not too deep."""
    if isinstance(one, Tensor):
        return is_meant(one)
    if depth == 0 or isinstance(one, (*_HOLD_NOTHING, nn.Module)):
        return False
    kind = type(one)
    if kind in MAPPINGS or kind in SEQUENCES or kind in (tuple, set, frozenset):
        inside = _parts(one)
    else:
        own = getattr(one, "__dict__", None)
        if type(own) is not dict or not is_of_program(kind):
            return False
        inside = list(own.values())
    return any(holds_tensor(part, is_meant, depth - 1) for part in inside)


def _weakly(contents: Any) -> Any:
    """Return contents in which no tensor is kept alive; ``_there`` gives them back."""
    if isinstance(contents, dict):
        return {key: _weak(value) for key, value in contents.items()}
    return list(map(_weak, contents))


def _weak(one: Any) -> Any:
    kind = type(one)
    if kind in _QUICK or isinstance(one, _HOLD_NOTHING):
        return one
    if (kind in MAPPINGS or kind in SEQUENCES) and not one:
        return one
    if kind in (tuple, list, dict):
        parts = _parts(one)
        return one if all(isinstance(part, _HOLD_NOTHING) for part in parts) else _GONE
    with suppress(TypeError):
        return _Weak(one)
    return _GONE


class _Weak(ref):  # type: ignore[type-arg]
    """A reference of ``_weak``: contents may be weak references themselves."""


def _there(one: Any) -> Any:
    if type(one) is not _Weak:
        return one
    found = one()
    return _GONE if found is None else found


def _contents(place: Any) -> Any:
    if isinstance(place, Names):
        return place.read()
    return dict(place) if type(place) in MAPPINGS else list(place)


def _parts(container: Any) -> list[Any]:
    """Return what a container holds, keys and values alike."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _same(now: list[Any], before: list[Any]) -> bool:
    """Whether a container holds the very same things."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
