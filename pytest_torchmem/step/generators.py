"""Random generators of a trace's own, where other threads draw from those of the process.

To seed these, and to put them back, would make such threads draw the same numbers again.

Where a GPU's own random numbers come from.

They are those that the program would draw on the CPU: host and GPUs draw from one generator, so
that a program on a GPU decides as it does on the CPU. A program that seeds the GPU's generator by
itself, or sets its state, gets what it asks for: that generator then has a sequence of its own,
apart from the host's. It joins the host's again when both are at the same place, as
``torch.manual_seed`` puts them.
"""

import ctypes
import itertools
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import BuiltinMethodType, MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor

from pytest_torchmem.torch_private.patches import Instead, default_generator, having, replaced_all

_NUMPY = "numpy.random"


#: As they are, whatever stands in their place in a test or a trace.
_Generator = torch.Generator
_address: Callable[[Tensor], int] = Tensor.data_ptr
#: Numbers up to which a program is taken to decide by what it draws.
_FEW = 1024
#: Draws after which a program that waits for another number gets one.
_ENOUGH = 1_000
_UNIFORM = ("aten::rand", "aten::rand_like", "aten::uniform_")
#: States of the Mersenne twister whose first numbers have no bit set, and all: a state of zeros
#: alone stays one, and tempering makes all bits of the second (Matsumoto and Nishimura, 1998).
_WORDS = ((*(0,) * 623, 1 << 31), (0x12DD9BB3,) * 624)


class ForwardDraws:
    """Where a trace's generator was when forwards drew, by the number that their backward has."""

    _MOST = 4096
    """Those that are kept, 5 KB each. The gradients of earlier forwards are not known."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, torch.Generator] = OrderedDict()
        self._numbers = itertools.count(1)

    def keep(self) -> int:
        """Keep where the generator is, and return the number."""
        number = next(self._numbers)
        self._kept[number] = _copy_of(current_generator())
        if len(self._kept) > self._MOST:
            self._kept.popitem(last=False)
        return number

    def of(self, number: int) -> torch.Generator | None:
        """Return a generator that is where the forward's was that has this number."""
        kept = self._kept.get(number)
        return None if kept is None else _copy_of(kept)


#: The whole state of a generator, also of one that programs are told another of.
state_of: Callable[[torch.Generator], Tensor] = torch.Generator.get_state
set_state_of: Callable[[torch.Generator, Tensor], object] = torch.Generator.set_state


def content_of(state: Tensor) -> bytes:
    return ctypes.string_at(_address(state), state.numel())


def _copy_of(generator: torch.Generator) -> torch.Generator:
    made = _Generator()
    set_state_of(made, state_of(generator))
    return made


class Draws:
    """What traces draw that their steps may decide by: LayerDrop skips a layer so.

    They are as in every trace, or others: then the first numbers are all at one ``end`` of what
    they are drawn from, 0 or 1, where whatever has any chance happens.
    """

    def __init__(self, end: int | None = None, noted: bool = True) -> None:
        self._end = end
        self._noted = noted
        self.any = False
        """Whether anything was drawn, if that is noted."""
        self._left = _ENOUGH

    def seed_python(self, generator: Any) -> Any:
        """Have ``random``'s functions, or a ``Random``, draw so; return what ``note`` takes."""
        if self._end is None:
            generator.seed(0)
        else:
            generator.setstate((3, (*_WORDS[self._end], 0), None))
        # 624 numbers, which take longer than whatever else a small trace does to generators.
        return generator.getstate() if self._noted else None

    def note(self, generator: Any, start: Any) -> None:
        """Take note of whether a generator of Python's has drawn anything since it was seeded."""
        if self._noted and not self.any:
            self.any = generator.getstate() != start

    def seed_numpy(self, generator: Any) -> None:
        """Have numpy's functions, or a ``RandomState``, draw so."""
        if self._end is None:
            generator.seed(0)
        else:
            generator.set_state(("MT19937", _WORDS[self._end], 0))

    def change(self, name: str, args: Sequence[Any], drawn: Tensor) -> None:
        """Put the end of its range into what an operator has drawn, of few numbers."""
        if drawn.numel() > _FEW:
            return
        self.any = True
        if self._end is None or name not in _UNIFORM or not self._left:
            return
        self._left -= 1
        given = name == "aten::uniform_" and len(args) > 2
        low, high = (float(args[1]), float(args[2])) if given else (0.0, 1.0)
        drawn.fill_(low + (high - low) * (self._end and 1 - 2**-24))  # as float32 has it


class _Own:
    """What the running trace has for itself."""

    now: torch.Generator | None = None
    """What the operator draws from that is being computed, where that is another."""
    host: torch.Generator | None = None
    """The generator of torch's, if it has one."""
    forwards: ForwardDraws | None = None
    draws = Draws(noted=False)
    apart: ClassVar[dict[int, torch.Generator]] = {}
    """GPUs' default generators that have a sequence of their own, by the index of the GPU."""
    defaults: ClassVar[dict[int, int]] = {}
    """The indices of GPUs by the addresses of their default generators."""


def drawing(draws: Draws) -> AbstractContextManager[None]:
    return having(_Own, draws=draws)


def current_draws() -> Draws:
    return _Own.draws


def is_alone() -> bool:
    """Return whether no other thread of Python could be drawing random numbers."""
    return threading.active_count() == 1


def own_generator() -> torch.Generator | None:
    """Return what values of the running trace are drawn from; None for torch's default one."""
    return _Own.now or _Own.host


def current_generator() -> torch.Generator:
    """Return what values of the running trace are drawn from."""
    return _Own.now or _Own.host or torch.default_generator


def forward_draws() -> ForwardDraws:
    """Return where the running trace keeps what forwards drew from, which goes with it."""
    return _Own.forwards or ForwardDraws()


def keeping_forward_draws(kept: ForwardDraws) -> AbstractContextManager[None]:
    """Have a trace's forwards keep there what they draw from."""
    return having(_Own, forwards=kept)


@contextmanager
def drawing_from(state: torch.Tensor) -> Iterator[None]:
    """Have kernels that take no generator draw from a state on; they draw as before afterwards."""
    default = torch.default_generator  # C++'s own, whatever ``torch.random`` has
    before = default.get_state()
    default.set_state(state)
    try:
        yield
    finally:
        default.set_state(before)


@contextmanager
def default_drawing_as(generator: torch.Generator) -> Iterator[None]:
    """Have kernels that take no generator draw from one, which is moved on as they draw."""
    with drawing_from(state_of(generator)):
        try:
            yield
        finally:
            set_state_of(generator, torch.default_generator.get_state())


@contextmanager
def own_generators(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Have random numbers come from generators of this trace's own, where ``on_thread()``."""
    made = _Generator()
    made.manual_seed(0)
    default: Any = default_generator.original
    with ExitStack() as stack:
        stack.enter_context(having(_Own, host=made))
        by_thread = Instead(lambda name: getattr(made if on_thread() else default, name))
        stack.enter_context(replaced_all([default_generator.by(by_thread)]))
        draws = _Own.draws
        python = random.Random()
        stack.callback(draws.note, python, draws.seed_python(python))
        of_python = _functions_of(random, random.seed, python, on_thread)
        stack.enter_context(replaced_all([(random, of_python)]))
        numpy: Any = sys.modules.get(_NUMPY)
        if numpy is not None:
            own = numpy.RandomState(0)
            draws.seed_numpy(own)
            of_numpy = _functions_of(numpy, numpy.random_sample, own, on_thread)
            for name, method in (("seed", own.seed), ("sample", own.random_sample)):
                of_numpy[name] = _by_thread(getattr(numpy, name), method, on_thread)
            stack.enter_context(replaced_all([(numpy, of_numpy)]))
        yield


def _functions_of(
    module: Any, one: Any, own: Any, on_thread: Callable[[], bool]
) -> dict[str, Callable[..., Any]]:
    """Return functions for those of a module that are methods of one generator, as ``one`` is."""
    generator = one.__self__
    found = {}
    for name, function in vars(module).items():
        methods = isinstance(function, (MethodType, BuiltinMethodType))
        if methods and function.__self__ is generator and hasattr(own, name):
            found[name] = _by_thread(function, getattr(own, name), on_thread)
    return found


def _by_thread(
    of_process: Callable[..., Any], own: Callable[..., Any], on_thread: Callable[[], bool]
) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return (own if on_thread() else of_process)(*args, **kwargs)

    return function


def gpu_generators(defaults: Sequence[torch.Generator]) -> AbstractContextManager[None]:
    """Let GPUs have default generators, which draw from the host's at first."""
    indices = {one._cdata: index for index, one in enumerate(defaults)}  # type: ignore[attr-defined]
    return having(_Own, apart={}, defaults=indices)


def set_apart(generator: torch.Generator) -> None:
    """Let a GPU's default generator draw for itself; for any other it does so anyway."""
    index = _index_of(generator)
    if index is not None:
        _Own.apart[index] = generator


def drawn_from(generator: torch.Generator) -> torch.Generator:
    """Return what a generator's numbers come from: the host's, for a GPU's that is not apart."""
    index = _index_of(generator)
    if index is None:
        return generator
    _join()
    return _Own.apart.get(index) or current_generator()


def generator_on(device: torch.device | None) -> torch.Generator:
    """Return what is drawn from on a device, of a call that names no generator."""
    return _apart_on(device) or current_generator()


def drawing_on(device: torch.device | None) -> AbstractContextManager[None]:
    """Have what a GPU computes draw from that GPU's generator, where it is apart."""
    apart = _apart_on(device)
    return nullcontext() if apart is None else having(_Own, now=apart)


def _index_of(generator: torch.Generator) -> int | None:
    return _Own.defaults.get(generator._cdata)  # type: ignore[attr-defined]


def _apart_on(device: torch.device | None) -> torch.Generator | None:
    if not _Own.apart:
        return None
    _join()
    return None if device is None or device.type != "cuda" else _Own.apart.get(device.index)


def _join() -> None:
    """Let generators that are where the host's is draw from that again."""
    host = current_generator()
    for index, generator in list(_Own.apart.items()):
        if content_of(state_of(generator)) == content_of(state_of(host)):
            del _Own.apart[index]
