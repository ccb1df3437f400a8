"""What users teach of operators for a run: aspects that come before the profiler's own records."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytest_torchmem.torch_private.keys import OpOverload

#: Aspects that are functions, and what each gets before the operator's arguments in their order.
LEADS: Mapping[str, tuple[str, ...]] = {
    "meta": (),
    "workspace": ("machine", "outputs"),
    "decomposition": ("machine",),
    "path": ("call",),
    "nested": ("nested",),
    "sparse": (),
    "compressed": ("machine",),
    "storages": ("outputs",),
    "at_most": (),
    "values": (),
    "flops": ("outputs",),
}


class Taught(NamedTuple):
    """Aspects of one overload on one device, by the names of ``OperatorRecord``'s fields."""

    aspects: Mapping[str, Any]

    @property
    def describes_kernel(self) -> bool:
        """Whether it describes outputs and workspace, so that no body is run."""
        return bool(set(self.aspects) - {"path", "values", "flops"})

    def speaks_of(self, *, composite: bool) -> bool:
        """Whether it can belong to this operator, a composite or one with a kernel.

        ``path`` is for the former alone, ``values`` for both, everything else for kernels.
        """
        if composite:
            return not set(self.aspects) - {"path", "values"}
        return "path" not in self.aspects

    def of_the_overload(self) -> dict[str, Any]:
        """Return the aspects that are the same on every device."""
        apart = {*LEADS, "order", "host_outputs", "takes_nothing"}
        return {name: value for name, value in self.aspects.items() if name not in apart}


_TAUGHT: dict[tuple[OpOverload, str], Taught] = {}
_generations = [0]


def teach(overloads: Iterable[OpOverload], devices: Iterable[str], taught: Taught) -> None:
    """Let aspects come first for overloads on devices."""
    _TAUGHT.update({(overload, device): taught for device in devices for overload in overloads})
    _generations.append(len(_generations))


def forget(overloads: Iterable[OpOverload], devices: Iterable[str]) -> None:
    """Let the profiler's own records hold again."""
    for device in devices:
        for overload in overloads:
            _TAUGHT.pop((overload, device), None)
    _generations.append(len(_generations))


def taught_of(overload: OpOverload, device: str) -> Taught | None:
    """Return what users taught of an overload on a device."""
    return _TAUGHT.get((overload, device))


def taught_paths(device: str) -> tuple[OpOverload, ...]:
    """Return the composite operators that users taught a path on a device."""
    return tuple(
        overload
        for (overload, on), taught in _TAUGHT.items()
        if on == device and "path" in taught.aspects
    )


def generation() -> int:
    """Return a number that is another one whenever what users teach has changed."""
    return _generations[-1]
