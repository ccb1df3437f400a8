"""Where a GPU's own random numbers come from.

They are those that the program would draw on the CPU: host and GPUs draw from one generator, so
that a program on a GPU decides as it does on the CPU. A program that seeds the GPU's generator by
itself, or sets its state, gets what it asks for: that generator then has a sequence of its own,
apart from the host's. It joins the host's again when both are at the same place, as
``torch.manual_seed`` puts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pytest_torchmem.step.generators import current_generator, drawing_with, same_state


class _Gpus:
    """The default generators of the running trace's GPUs."""

    def __init__(self) -> None:
        self.apart: dict[int, torch.Generator] = {}
        """Those that have a sequence of their own, by the index of the GPU."""
        self.defaults: dict[int, int] = {}
        """The indices by the generators' addresses."""


_GPUS = _Gpus()


@contextmanager
def gpu_generators(defaults: Sequence[torch.Generator]) -> Iterator[None]:
    """Let GPUs have default generators, which draw from the host's at first."""
    before = _GPUS.apart, _GPUS.defaults
    _GPUS.apart = {}
    _GPUS.defaults = {one._cdata: index for index, one in enumerate(defaults)}  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _GPUS.apart, _GPUS.defaults = before


def set_apart(generator: torch.Generator) -> None:
    """Let a GPU's default generator draw for itself; for any other it does so anyway."""
    index = _index_of(generator)
    if index is not None:
        _GPUS.apart[index] = generator


def drawn_from(generator: torch.Generator) -> torch.Generator:
    """Return what a generator's numbers come from: the host's, for a GPU's that is not apart."""
    if not _GPUS.defaults:
        return generator
    index = _index_of(generator)
    if index is None:
        return generator
    _join()
    return _GPUS.apart.get(index) or current_generator()


def generator_on(device: torch.device | None) -> torch.Generator:
    """Return what is drawn from on a device, of a call that names no generator."""
    return _apart_on(device) or current_generator()


@contextmanager
def drawing_on(device: torch.device | None) -> Iterator[None]:
    """Have what a GPU computes draw from that GPU's generator, where it is apart."""
    apart = _apart_on(device)
    if apart is None:
        yield
    else:
        with drawing_with(apart):
            yield


def _index_of(generator: torch.Generator) -> int | None:
    return _GPUS.defaults.get(generator._cdata)  # type: ignore[attr-defined]


def _apart_on(device: torch.device | None) -> torch.Generator | None:
    if not _GPUS.apart:
        return None
    _join()
    return None if device is None or device.type != "cuda" else _GPUS.apart.get(device.index)


def _join() -> None:
    """Let generators that are where the host's is draw from that again."""
    if _GPUS.apart:
        host = current_generator()
        for index, generator in list(_GPUS.apart.items()):
            if same_state(generator, host):
                del _GPUS.apart[index]
