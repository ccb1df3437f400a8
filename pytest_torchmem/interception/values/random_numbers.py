"""Random generators stay where the program's would be, also past what a trace does not draw.

An operator that is not computed leaves its generator where it was, and every later number would be
another than the program's. So the generator is moved on by what the CPU's kernel draws. That takes
time in proportion to the draws, or tens of milliseconds, and nobody may ask for a number again:
meanwhile the generator has a state of another sequence, by which the place is found that it stands
for. A program may read this state, and set it again, as any other.

Kernels that draw again what they reject draw as many numbers as values say. Where these are not
known the generator's place is not known either, nor the numbers that come next.

The CPU's generator is moved on by any number of draws without drawing them. ``at::mt19937``
(ATen/core/MT19937RNGEngine.h) is linear over GF(2): its words x(i) follow from those before them by
exclusive or alone. So all of them obey one polynomial p of degree 19,937, and x(m + i) is the sum
of x(k + i) over the terms t^k of t^m modulo p (Haramoto, Matsumoto, L'Ecuyer, «A fast jump ahead
algorithm for linear recurrences in a polynomial space», 2008). A polynomial is an integer here,
whose bit k stands for t^k.
"""

import ctypes
import itertools
import math
from array import array
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import Call, Output, Plan
from pytest_torchmem.interception.values.contents import Values, is_floating
from pytest_torchmem.step import generators, trees
from pytest_torchmem.torch_private.keys import at_kernels
from pytest_torchmem.torch_private.tensors import TensorBase

_WORDS = 624
"""Words of a state, which are drawn one by one and then made anew all at once."""
_MIDDLE = 397
_DEGREE = 19_937
_TWIST = 0x9908B0DF

# CPUGeneratorImplStateLegacy (ATen/CPUGeneratorImpl.cpp): the seed, how many words are left,
# whether it was seeded, the next word, and the words, each in 8 bytes.
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), 24
_KEY = slice(8, 40)

_FEW_WORDS = 1 << 23
"""Words up to which it is quicker to draw them."""

#: Those of torch, whatever a trace puts in their place.
_address: Callable[[Tensor], int] = Tensor.data_ptr
_from_buffer = torch.frombuffer
_Generator = torch.Generator


class StandIn:
    """States like another one but for two words, which no generator comes to by itself."""

    _numbers = itertools.count()
    _WORD = 0x746F7263

    def __init__(self, state: Tensor) -> None:
        self._content = bytearray(generators.content_of(state))
        self._state = _state_of(self._content)

    def set_anew(self, generator: torch.Generator) -> bytes:
        """Give a generator a state that none had before; return its key."""
        number = (next(self._numbers) & 0xFFFFFFFF).to_bytes(8, "little")
        self._content[_STATE : _KEY.stop] = number + self._WORD.to_bytes(8, "little")
        _Generator.set_state(generator, self._state)
        return bytes(self._content[_KEY])


def key_of(state: Tensor) -> bytes:
    """Return what tells a state from others: how far it was drawn from, and two of its words."""
    return ctypes.string_at(_address(state) + _KEY.start, _KEY.stop - _KEY.start)


def words_drawn(before: Tensor, after: Tensor, most: int) -> int | None:
    """Return how many words were drawn between two states, ``None`` if not up to ``most``."""
    generator = _Generator()
    generator.set_state(before)
    content, target = generators.content_of(before), generators.content_of(after)
    first, last, blocks = _drawn_of_block(content), _drawn_of_block(target), 0
    while content[_STATE : _STATE + 8 * _WORDS] != target[_STATE : _STATE + 8 * _WORDS]:
        blocks += 1
        if blocks * _WORDS > most + _WORDS:
            return None
        draw(generator, _WORDS)
        content = generators.content_of(generator.get_state())
    return blocks * _WORDS + last - first


def moved_on(state: Tensor, words: int) -> Tensor:
    """Return the state of a generator after ``words`` more draws of 32 bits."""
    content = bytearray(generators.content_of(state))
    blocks, drawn = divmod(_drawn_of_block(content) + words - 1, _WORDS)
    if blocks and words > _FEW_WORDS:
        content[_STATE : _STATE + 8 * _WORDS] = _after_blocks(state, blocks)
    elif blocks:
        generator = _Generator()
        generator.set_state(state)
        draw(generator, words)
        moved = generators.content_of(generator.get_state())
        content[_STATE : _STATE + 8 * _WORDS] = moved[_STATE : _STATE + 8 * _WORDS]
    content[_LEFT] = (_WORDS - drawn).to_bytes(4, "little")
    content[_NEXT] = (drawn + 1).to_bytes(8, "little")
    return _state_of(content)


def _state_of(content: bytearray) -> Tensor:
    return _from_buffer(content, dtype=torch.uint8)


def _drawn_of_block(content: bytes | bytearray) -> int:
    """Return how many words of the state were drawn; what is seeded anew counts as all drawn."""
    return _WORDS + 1 - int.from_bytes(content[_LEFT], "little")


def draw(generator: torch.Generator, words: int) -> None:
    # ``random_from_to`` (native/cpu/DistributionTemplates.h) draws one word for a small range.
    chunk = torch.empty(min(words, 1 << 16), dtype=torch.uint8)
    while words > 0:
        TensorBase.random_(chunk[:words], 0, 2, generator=generator)
        words -= chunk.numel()


def _after_blocks(state: Tensor, blocks: int) -> bytes:
    """Return the words of a state after so many times 624 draws, each in 8 bytes."""
    # x(0) is part of the recurrence by its first bit alone: the sum begins at x(1).
    generator, words = _Generator(), array("I")
    generator.set_state(state)
    for _ in range(-(-(_DEGREE + _WORDS) // _WORDS)):
        content = generators.content_of(generator.get_state())[_STATE : _STATE + 8 * _WORDS]
        words.extend(array("Q", content).tolist())
        draw(generator, _WORDS)
    sum_, view = 0, memoryview(words).cast("B")
    for power in _terms(_power_of_t(blocks * _WORDS - 1)):
        start = 4 * (power + 1)
        sum_ ^= int.from_bytes(view[start : start + 4 * _WORDS], "little")
    return array("Q", array("I", sum_.to_bytes(4 * _WORDS, "little"))).tobytes()


@lru_cache(maxsize=256)
def _power_of_t(exponent: int) -> int:
    result = 1
    for bit in bin(exponent)[2:]:
        # To square is to put a 0 before every bit, which is what a number in base 4 has.
        result = int(format(result, "b"), 4) << int(bit)
        while high := result >> _DEGREE:
            result &= (1 << _DEGREE) - 1
            for power in _lower_terms():
                result ^= high << power
    return result


@cache
def _lower_terms() -> tuple[int, ...]:
    """Return the terms of the polynomial below the highest. Matsumoto and Nishimura, «Mersenne
    Twister» (1998), appendix A.
    """
    a, b = 1 << _WORDS ^ 1 << _MIDDLE, 1 << (_WORDS - 1) ^ 1 << (_MIDDLE - 1)
    powers = [*itertools.accumulate([b] * 31, _product, initial=1)]
    polynomial = _product(a, powers[31])
    for bit in range(31):
        if _TWIST >> bit & 1:
            polynomial ^= _product(a, powers[30 - bit])
    polynomial ^= _TWIST >> 31
    return tuple(power for power in _terms(polynomial) if power != _DEGREE)


def _product(one: int, other: int) -> int:
    result = 0
    for power in _terms(other):
        result ^= one << power
    return result


def _terms(polynomial: int) -> list[int]:
    return [place for place, bit in enumerate(reversed(bin(polynomial)[2:])) if bit == "1"]


#: Words up to which a generator is moved on at once, or for any number that may be asked for.
_FEW = 1 << 12
_SOME = 1 << 16
#: Elements up to which a kernel is run to draw its numbers, on memory of its own.
_RUN = 1 << 11
_LARGEST_RUN = 1 << 22

_DISTRIBUTIONS = {
    "cauchy": ("cauchy_", "median", "sigma"),
    "exponential": ("exponential_", "lambd"),
    "geometric": ("geometric_", "p"),
    "log_normal": ("log_normal_", "mean", "std"),
    **dict.fromkeys(("normal", "randn", "randn_like"), ("normal_",)),
    **dict.fromkeys(("uniform", "rand", "rand_like"), ("uniform_",)),
}
"""Methods that draw what operators do, and the operators' arguments that say how."""
_INTEGERS = ("randint", "randint_like", "random")
#: Marked as random, and only asked what to run, or of the GPU's generator alone.
_DRAW_NOTHING = ("aten::_fused_sdp_choice", "aten::_cudnn_init_dropout_state")
_FUSED_ATTENTION = "_scaled_dot_product_"


class KernelDraws(NamedTuple):
    """What a kernel of the CPU fills with random numbers."""

    method: str
    numbers: tuple[Any, ...]
    dtype: torch.dtype
    elements: int
    dense: bool = True

    def run(self, generator: torch.Generator) -> None:
        """Draw the numbers, and keep none."""
        if self.method == "randperm":
            torch.randperm(self.elements, generator=generator)
            return
        made = torch.empty(self.elements * (1 if self.dense else 2), dtype=self.dtype)
        made = made if self.dense else made[::2]
        numbers = self.numbers
        if self.method == "bernoulli_" and not numbers:
            numbers = (torch.full((self.elements,), 0.5, dtype=self.dtype),)
        getattr(TensorBase, self.method)(made, *numbers, generator=generator)


class _Place(NamedTuple):
    """Where a generator would be: ``words`` draws after a state, an unknown number for ``None``."""

    state: Tensor
    words: int | None
    stand_in: StandIn
    why: str = ""


class RandomNumbers:
    """Moves the generators of one pass on."""

    def __init__(self, mode: Values, tell: Callable[[str], None], line: Callable[[], str]) -> None:
        self._mode = mode
        self._tell = tell
        self._line = line
        self._places: dict[bytes, _Place] = {}
        """By the states that stand for them."""
        self.left_out = False
        """Whether something was not drawn that another pass would draw."""

    def ready(self, call: Call, plan: Plan) -> bool:
        """Return whether an operator may draw: its generator is where the program's would be. In a
        pass that may be followed by another, large tensors that nobody decides by are not worth the
        time that this takes.
        """
        if not self._places:
            return True
        generator = generator_of(call)
        place = self._places.get(key_of(generators.state_of(generator)))
        if place is None or not draws_numbers(call):
            return True
        if place.words is None:
            if self._mode is Values.ASKED_FOR:
                self.left_out = True
                return False
            self._tell(
                f"random numbers after {place.why} are not those that the program would draw"
            )
            generators.set_state_of(generator, place.state)
            return True
        if place.words > _SOME and not self._mode.wants_all:
            dtype, elements, _ = _filled_by(call, plan)
            # What a program is likely to ask for is a number, or integers.
            if elements > 1 and is_floating(dtype):
                self.left_out = True
                return False
        with at_kernels():
            generators.set_state_of(generator, moved_on(place.state, place.words))
        return True

    def skip(self, call: Call, plan: Plan) -> None:
        """Move the generator on by what an operator would have drawn."""
        if plan.drawn is None:
            try:
                plan.drawn = _drawn_by(call, plan) if draws_numbers(call) else ()
            except _NotCounted:
                plan.drawn = (None,)
        for drawn in plan.drawn:
            words = None if drawn is None else _words_of(drawn)
            self._skip(generator_of(call), drawn, words, call.operator.name)

    def _skip(
        self, generator: torch.Generator, draws: KernelDraws | None, words: int | None, name: str
    ) -> None:
        state = generators.state_of(generator)
        place = self._places.get(key_of(state)) if self._places else None
        if place is not None and place.words is None:
            return
        if draws is not None and draws.elements <= _LARGEST_RUN and _keeps_one(draws):
            with at_kernels():
                if place is not None:
                    generators.set_state_of(generator, moved_on(place.state, place.words or 0))
                draws.run(generator)
        elif words is None:
            self.lose(generator, name)
        elif place is None and words <= _FEW:
            with at_kernels():
                draw(generator, words)
        elif place is None:
            self._stand_in(generator, _Place(state, words, StandIn(state)))
        else:
            self._stand_in(generator, place._replace(words=(place.words or 0) + words))

    def lose(self, generator: torch.Generator, why: str) -> None:
        """Take note that the program would have drawn, or not, as values say that are not known."""
        state = generators.state_of(generator)
        place = self._places.get(key_of(state)) or _Place(state, 0, StandIn(state))
        if place.words is not None:
            why = f"{why} ({self._line() or 'the traced program'})"
            self._stand_in(generator, place._replace(words=None, why=why))

    def _stand_in(self, generator: torch.Generator, place: _Place) -> None:
        """Give a generator a state that no program has, and which stands for ``place``."""
        self._places[place.stand_in.set_anew(generator)] = place


class _NotCounted(Exception):
    """How many numbers an operator draws follows from values, or is not known here."""


def generator_of(call: Call) -> torch.Generator:
    given = call.named.get("generator")
    if given is not None:
        return generators.drawn_from(given)
    return generators.generator_on(None if call.device is None else call.device.device)


def draws_numbers(call: Call) -> bool:
    """Return whether an operator draws numbers as it is called: dropout of nothing does not."""
    if not call.operator.random:
        return False
    named, names, name = call.named, call.operator.argument_names, call.operator.name
    if name in _DRAW_NOTHING or name.endswith("_backward"):
        return False
    if "dropout_p" in names:
        return bool(named.get("dropout_p"))
    if name == "aten::_cudnn_rnn":
        return bool(named["dropout"]) and bool(named["train"])
    if name == "aten::native_dropout":
        return named["train"] is not False
    return "training" not in names or bool(named.get("training"))


def _filled_by(call: Call, plan: Plan) -> tuple[torch.dtype, int, bool]:
    """Return type and elements of what is drawn, and whether it is contiguous."""
    for output in trees.argument_leaves(plan.outputs, Output):
        return output.dtype, math.prod(output.shape), True
    tensor = call.tensors[0]
    return tensor.dtype, tensor.numel(), tensor.is_contiguous()


def _drawn_by(call: Call, plan: Plan) -> tuple[KernelDraws, ...]:
    """Return what the CPU's kernels draw for an operator. Raises ``_NotCounted``."""
    named, name = call.named, call.operator.name.removeprefix("aten::").partition(".")[0]
    base = name.rstrip("_").removesuffix("_functional")
    dtype, elements, dense = _filled_by(call, plan)
    if base in _DISTRIBUTIONS:
        if dtype.is_complex:  # of its real and imaginary parts
            dtype, elements = dtype.to_real(), 2 * elements
        method, *names = _DISTRIBUTIONS[base]
        numbers = tuple(named[one] for one in names if one in named)
        return (KernelDraws(method, numbers, dtype, elements, dense),)
    if base in _INTEGERS:
        limits = (named.get("low", named.get("from")), named.get("high", named.get("to")))
        numbers = () if limits[1] is None else (limits[0] or 0, limits[1])
        return (KernelDraws("random_", numbers, dtype, elements),)
    if base == "randperm":
        return (KernelDraws("randperm", (), dtype, elements),)
    if base == "bernoulli":
        if call.operator.name.endswith((".float", ".p")):
            return (KernelDraws("bernoulli_", (named.get("p", 0.5),), dtype, elements),)
        return (KernelDraws("bernoulli_", (), named.get("p", named["self"]).dtype, elements),)
    if base == "native_dropout":
        return (KernelDraws("bernoulli_", (1 - named["p"],), torch.bool, elements),)
    if base == "multinomial":  # native/Distributions.cpp, cpu/MultinomialKernel.cpp
        chances, samples = named["self"], named["num_samples"]
        if named.get("replacement") and samples > 1:
            rows = chances.numel() // max(1, chances.shape[-1])
            return (KernelDraws("uniform_", (), torch.float64, rows * samples),)
        return (KernelDraws("exponential_", (), chances.dtype, chances.numel()),)
    if name.startswith(_FUSED_ATTENTION):
        # The CPU drops weights of its own formula; native/transformers/attention.cpp.
        query, key = named["query"], named["key"]
        weights = query.numel() // query.shape[-1] * key.shape[-2]
        return (KernelDraws("bernoulli_", (1 - named["dropout_p"],), query.dtype, weights),)
    if name == "_cudnn_rnn":
        # One dropout behind each layer but the last; native/RNN.cpp, apply_layer_stack.
        between = KernelDraws("bernoulli_", (1 - named["dropout"],), dtype, elements)
        return (between,) * int(named["num_layers"] - 1)
    raise _NotCounted


def _keeps_one(draws: KernelDraws) -> bool:
    """Return whether a kernel may leave a normal number to the next, or begin with such a one."""
    serial = draws.elements < 16 or not draws.dense
    return draws.method == "log_normal_" or (draws.method == "normal_" and serial)


@lru_cache(maxsize=1024)
def _words_of(draws: KernelDraws) -> int | None:
    """Return how many words a kernel draws, ``None`` if that does not follow from its elements.

    Its build and the machine decide: bernoulli_ draws one word with MKL on an Intel processor, and
    two for each element elsewhere (native/cpu/DistributionKernels.cpp). So it is asked.
    """
    if _keeps_one(draws):
        return None
    if draws.elements <= _RUN:
        return _words_when_run(draws)
    rest = draws.elements % 16  # normal_ fills in vectors of 16
    few = _words_when_run(draws._replace(elements=_RUN + rest))
    more = _words_when_run(draws._replace(elements=2 * _RUN + rest))
    if few is None or more is None:
        return None
    each, left = divmod((more - few) * (draws.elements - rest - _RUN), _RUN)
    return None if left else few + each


@lru_cache(maxsize=1024)
def _words_when_run(draws: KernelDraws) -> int | None:
    generator = _Generator().manual_seed(0)
    before = generator.get_state()
    with at_kernels():
        draws.run(generator)
        return words_drawn(before, generator.get_state(), most=8 * draws.elements + 64)
