"""Random number generators of fake cuda: a trace has no random numbers, but their seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.fake_cuda.api.factories import SESSION
from pytest_torchmem.interception.placement import GPU_GENERATORS
from pytest_torchmem.targets.device_index import check_ordinal
from pytest_torchmem.torch_private.patches import replaced_all

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda", 0)
_NUMBER = 8
"""Bytes of the seed, and of the offset, in a state; cuda/CUDAGeneratorImpl.cpp, ``get_state``."""


@contextmanager
def generators(default: Any) -> Iterator[None]:
    """Have generators that can be made for cuda, and ``default`` as the GPU's own."""
    with replaced_all(
        [
            (torch, {"Generator": _generator(torch.Generator)}),
            (torch.cuda, {"default_generators": (default,)}),
        ]
    ):
        yield


def default_generator() -> Any:
    """Return the generator that a GPU has from the beginning."""
    return _fake(_generator(torch.Generator))


def random_answers(default: Any) -> dict[str, Callable[..., Any]]:
    """Return what ``torch.cuda.random`` answers of the GPU's own generator, by name."""
    return {
        "manual_seed": lambda seed: _nothing(default.manual_seed(int(seed))),
        "manual_seed_all": lambda seed: _nothing(default.manual_seed(int(seed))),
        "seed": lambda: _nothing(default.seed()),
        "seed_all": lambda: _nothing(default.seed()),
        "initial_seed": default.initial_seed,
        "get_rng_state": lambda device="cuda": default.get_state(),
        "get_rng_state_all": lambda: [default.get_state()],
        "set_rng_state": lambda new_state, device="cuda": _nothing(default.set_state(new_state)),
        "set_rng_state_all": lambda new_states: _nothing(
            [default.set_state(state) for state in new_states]
        ),
    }


def _nothing(_: Any) -> None:
    return None


def _fake(kind: Any) -> Any:
    made = kind.on_host.__new__(kind, device="cpu")
    made._fake = _CUDA
    GPU_GENERATORS[made._cdata] = made
    return made


@cache
def _generator(original: Any) -> type:
    """Return a ``torch.Generator`` that can be made for cuda; its numbers are the CPU's."""
    session = SESSION

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=Kind):  # type: ignore[misc]
        on_host = original
        _fake: torch.device | None = None
        _offset = 0

        def __new__(cls, device: Any = "cpu") -> Any:
            if isinstance(device, int):
                device = torch.device("cuda", device)
            if session.off() or torch.device(device).type != "cuda":
                return original(device=device)
            check_ordinal(device)
            return _fake(cls)

        def __init__(self, device: Any = "cpu") -> None:
            pass

        @property
        def device(self) -> torch.device:
            return self._fake or _CPU

        def get_offset(self) -> int:
            return self._offset

        def set_offset(self, offset: int) -> None:
            self._offset = offset

        def get_state(self) -> Tensor:
            """Return the seed and the offset, on the CPU."""
            numbers = (self.initial_seed(), self._offset)
            content = b"".join(number.to_bytes(_NUMBER, "little") for number in numbers)
            if session.off():
                return torch.tensor(list(content), dtype=torch.uint8)
            with session.running.working():
                made = torch.tensor(list(content), dtype=torch.uint8)
            session.running.meet(made)
            return made

        def set_state(self, new_state: Tensor) -> Any:
            """Take over the seed and the offset, where they are known."""
            if new_state.numel() not in (_NUMBER, 2 * _NUMBER):
                raise RuntimeError("RNG state is wrong size")
            try:
                content = bytes(new_state.tolist())
            except UnknownValueError:
                return self
            self.manual_seed(int.from_bytes(content[:_NUMBER], "little"))
            self._offset = int.from_bytes(content[_NUMBER:], "little")
            return self

        def clone_state(self) -> Any:
            made = _fake(type(self))
            made.manual_seed(self.initial_seed())
            made._offset = self._offset
            return made

    return Generator
