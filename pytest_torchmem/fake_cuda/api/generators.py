"""Random number generators of fake cuda, which have seeds and draw nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.interception.placement import GPU_GENERATORS
from pytest_torchmem.targets.device_index import as_device
from pytest_torchmem.torch_private.patching.patches import Replacements

_CPU = torch.device("cpu")
_OnHost = torch.Generator
_NUMBER = 8
"""Bytes of the seed, and of the offset, in a state; cuda/CUDAGeneratorImpl.cpp, ``get_state``."""


class _Kind(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OnHost)


class Generator(torch.Generator, metaclass=_Kind):
    """A ``torch.Generator`` that can be made for cuda; its numbers are the CPU's."""

    _gpu: torch.device | None = None
    _offset = 0

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make a generator of fake cuda, or one of torch's own for the host."""
        if SESSION.off() or as_device(device).type != "cuda":
            return _OnHost(device=device)
        named = as_device(device)
        return cls.on_gpu(SESSION.index_of(named))

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
        """Where the generator is."""
        return self._gpu or _CPU

    def get_offset(self) -> int:
        """Return the offset of Philox's sequence, which stays as it was set."""
        return self._offset

    def set_offset(self, offset: int) -> Generator:
        """Set the offset of Philox's sequence."""
        self._offset = offset
        return self

    def get_state(self) -> Tensor:
        """Return the seed and the offset, on the CPU."""
        numbers = (self.initial_seed(), self._offset)
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
        self.manual_seed(int.from_bytes(content[:_NUMBER], "little"))
        self._offset = int.from_bytes(content[_NUMBER:], "little")
        return self

    def clone_state(self) -> Generator:
        """Return a generator with the same seed and offset."""
        made = self.on_gpu(self.device.index)
        made.manual_seed(self.initial_seed())
        made._offset = self._offset
        return made

    def graphsafe_get_state(self) -> Generator:
        """Return the state as a generator, as compiled code that is checkpointed saves it."""
        return self.clone_state()

    def graphsafe_set_state(self, state: torch.Generator) -> Generator:
        """Take over the seed and the offset of another generator."""
        self.manual_seed(state.initial_seed())
        self._offset = state.get_offset()
        return self


def generators() -> Replacements:
    """Have generators that can be made for cuda."""
    return [(torch, {"Generator": Generator})]


def random_functions(
    default: Generator, defaults: Sequence[Generator]
) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda.random`` for a GPU's own generator, by name.

    ``defaults`` are those of all GPUs.
    """

    def manual_seed(seed: int) -> None:
        default.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for generator in defaults:
            generator.manual_seed(int(seed))

    def seed() -> None:
        default.seed()

    def seed_all() -> None:
        manual_seed_all(default.seed())

    def set_states(new_states: Iterable[Tensor]) -> None:
        for generator, state in zip(defaults, new_states, strict=False):
            generator.set_state(state)

    def set_state(new_state: Tensor) -> None:
        default.set_state(new_state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "seed": seed,
        "seed_all": seed_all,
        "initial_seed": default.initial_seed,
        "get_rng_state": lambda device="cuda": default.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in defaults],
        "set_rng_state": lambda new_state, device="cuda": set_state(new_state),
        "set_rng_state_all": set_states,
    }
