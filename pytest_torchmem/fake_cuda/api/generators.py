"""Random number generators of fake cuda, which draw as those of the CPU do.

``step/generators.py`` says when a GPU's default generator draws for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.fake_cuda.api.session import SESSION, Functions
from pytest_torchmem.interception.placement import GPU_GENERATORS
from pytest_torchmem.interception.values.random_numbers import moved_on
from pytest_torchmem.step.generators import content_of, drawn_from, set_apart, state_of
from pytest_torchmem.targets.target import as_device

_CPU = torch.device("cpu")
_OnHost = torch.Generator
_NUMBER = 8
"""Bytes of the seed, and of the offset, in a state; cuda/CUDAGeneratorImpl.cpp, ``get_state``."""
_PHILOX = 4
"""What offsets are multiples of; cuda/CUDAGeneratorImpl.cpp, ``set_philox_offset_per_thread``."""
_DIGEST = 6
"""Bytes by which states are told from each other."""


class _Kind(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OnHost)


class Generator(torch.Generator, metaclass=_Kind):
    """A ``torch.Generator`` that can be made for cuda; its numbers are the CPU's."""

    _gpu: torch.device | None = None

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator of fake cuda, or one of torch's own for the host."""
        if SESSION.off() or as_device(device).type != "cuda":
            return _OnHost(device=device)
        return cls.on_gpu(SESSION.index_of(as_device(device)))

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @classmethod
    def on_gpu(cls, index: int) -> Generator:
        """Return a new generator of a GPU, whether or not a trace is running."""
        made: Any = cast(Any, _OnHost).__new__(cls, device="cpu")
        made._gpu = torch.device("cuda", index)
        GPU_GENERATORS[made._cdata] = made
        return cast(Generator, made)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._gpu or _CPU

    def manual_seed(self, seed: int) -> Generator:
        _OnHost.manual_seed(self, seed)
        set_apart(self)
        return self

    def seed(self) -> int:
        """Begin anew, with a seed that nobody knows before."""
        seed = _OnHost.seed(self)
        set_apart(self)
        return seed

    def get_offset(self) -> int:
        """Return what stands for the place in the sequence of this seed."""
        return STATES.offset_of(self.initial_seed(), state_of(drawn_from(self)))

    def set_offset(self, offset: int) -> Generator:
        self._begin_at(self.initial_seed(), offset)
        return self

    def get_state(self) -> Tensor:
        numbers = (self.initial_seed(), self.get_offset())
        content = b"".join(number.to_bytes(_NUMBER, "little") for number in numbers)
        if SESSION.off():
            return torch.tensor(list(content), dtype=torch.uint8)
        with SESSION.running.working():
            made = torch.tensor(list(content), dtype=torch.uint8)
        SESSION.running.meet(made)
        return made

    def set_state(self, new_state: Tensor) -> Generator:
        """Take over the seed and the offset, where they are known."""
        if new_state.numel() not in (_NUMBER, 2 * _NUMBER):
            raise RuntimeError("RNG state is wrong size")
        try:
            content = bytes(new_state.tolist())
        except UnknownValueError:
            return self
        seed, offset = content[:_NUMBER], content[_NUMBER:]
        self._begin_at(int.from_bytes(seed, "little"), int.from_bytes(offset, "little"))
        return self

    def _begin_at(self, seed: int, offset: int) -> None:
        _OnHost.manual_seed(self, seed)
        if offset:
            _OnHost.set_state(self, STATES.state_at(seed, offset))
        set_apart(self)

    def __reduce__(self) -> Any:
        """Pickle device, seed and state (torch/csrc/Generator.cpp, ``THPGenerator_reduce``)."""
        state = self.initial_seed(), self.get_offset(), self.get_state()
        return torch.Generator, (self.device,), state

    def __setstate__(self, state: tuple[int, int | None, Tensor]) -> None:
        self.set_state(state[2])

    def clone_state(self) -> Generator:
        made = self.on_gpu(self.device.index)
        made.graphsafe_set_state(self)
        return made

    graphsafe_get_state = clone_state
    """Returns the state as a generator, as compiled code that is checkpointed saves it."""

    def graphsafe_set_state(self, state: torch.Generator) -> Generator:
        """Draw from now on what another generator would."""
        _OnHost.manual_seed(self, state.initial_seed())
        _OnHost.set_state(self, state_of(drawn_from(state)))
        set_apart(self)
        return self


class _States:
    """States of generators by seed and offset, which is all that a program is told of them.

    A seed alone is at offset 0. At any other is what was told, or, where nothing was, what is so
    many draws further.
    """

    _MOST = 4096
    """Those that are kept, 5 KB each."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self._offsets: dict[tuple[int, bytes], int] = {}

    def offset_of(self, seed: int, state: Tensor) -> int:
        """Return what stands for a state beside its seed."""
        content = content_of(state)
        if content == content_of(self._seeded(seed)):
            return 0
        digest = blake2b(content, digest_size=_DIGEST).digest()
        offset = self._offsets.get((seed, digest))
        if offset is None:
            offset = int.from_bytes(digest, "little") * _PHILOX
            self._keep(seed, offset, digest, state)
        return offset

    def state_at(self, seed: int, offset: int) -> Tensor:
        """Return the state that an offset stands for."""
        state = self._kept.get((seed, offset))
        if state is None:
            state = moved_on(self._seeded(seed), offset)
            digest = blake2b(content_of(state), digest_size=_DIGEST).digest()
            self._keep(seed, offset, digest, state)
        return state

    def _keep(self, seed: int, offset: int, digest: bytes, state: Tensor) -> None:
        self._kept[seed, offset] = state
        self._offsets[seed, digest] = offset
        if len(self._kept) > self._MOST:
            self._kept.popitem(last=False)
            self._offsets.pop(next(iter(self._offsets)))

    def _seeded(self, seed: int) -> Tensor:
        return state_of(_OnHost().manual_seed(seed))


STATES = _States()

RANDOM: Functions = {
    "initial_seed": lambda gpu: gpu.generator.initial_seed(),
    "get_rng_state": lambda gpu, device="cuda": gpu.generator.get_state(),
}
"""The functions of ``torch.cuda.random`` that would initialise CUDA; the others are torch's own."""
