"""The CPU's random generator, moved on by any number of draws without drawing them.

``at::mt19937`` (ATen/core/MT19937RNGEngine.h) is linear over GF(2): its words x(i) follow from
those before them by exclusive or alone. So all of them obey one polynomial p of degree 19,937, and
x(m + i) is the sum of x(k + i) over the terms t^k of t^m modulo p (Haramoto, Matsumoto, L'Ecuyer,
«A fast jump ahead algorithm for linear recurrences in a polynomial space», 2008). A polynomial is
an integer here, whose bit k stands for t^k.
"""

import ctypes
import itertools
from array import array
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from pytest_torchmem.step.generators import content_of

_WORDS = 624
"""Words of a state, which are drawn one by one and then made anew all at once."""
_MIDDLE = 397
_DEGREE = 19_937
_TWIST = 0x9908B0DF

# CPUGeneratorImplStateLegacy (ATen/CPUGeneratorImpl.cpp): the seed, how many words are left,
# whether it was seeded, the next word, and the words, each in 8 bytes.
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), 24
_KEY = slice(8, 40)

_FEW = 1 << 23
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
        self._content = bytearray(content_of(state))
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
    content, target = content_of(before), content_of(after)
    first, last, blocks = _drawn_of_block(content), _drawn_of_block(target), 0
    while content[_STATE : _STATE + 8 * _WORDS] != target[_STATE : _STATE + 8 * _WORDS]:
        blocks += 1
        if blocks * _WORDS > most + _WORDS:
            return None
        draw(generator, _WORDS)
        content = content_of(generator.get_state())
    return blocks * _WORDS + last - first


def moved_on(state: Tensor, words: int) -> Tensor:
    """Return the state of a generator after ``words`` more draws of 32 bits."""
    content = bytearray(content_of(state))
    blocks, drawn = divmod(_drawn_of_block(content) + words - 1, _WORDS)
    if blocks and words > _FEW:
        content[_STATE : _STATE + 8 * _WORDS] = _after_blocks(state, blocks)
    elif blocks:
        generator = _Generator()
        generator.set_state(state)
        draw(generator, words)
        moved = content_of(generator.get_state())
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
    """Draw so many words of 32 bits."""
    # ``random_from_to`` (native/cpu/DistributionTemplates.h) draws one word for a small range.
    chunk = torch.empty(min(words, 1 << 16), dtype=torch.uint8)
    while words > 0:
        chunk[:words].random_(0, 2, generator=generator)
        words -= chunk.numel()


def _after_blocks(state: Tensor, blocks: int) -> bytes:
    """Return the words of a state after so many times 624 draws, each in 8 bytes."""
    # x(0) is part of the recurrence by its first bit alone: the sum begins at x(1).
    generator, words = _Generator(), array("I")
    generator.set_state(state)
    for _ in range(-(-(_DEGREE + _WORDS) // _WORDS)):
        content = content_of(generator.get_state())[_STATE : _STATE + 8 * _WORDS]
        words.extend(array("Q", content).tolist())
        draw(generator, _WORDS)
    sum_, view = 0, memoryview(words).cast("B")
    for power in _terms(_power_of_t(blocks * _WORDS - 1)):
        start = 4 * (power + 1)
        sum_ ^= int.from_bytes(view[start : start + 4 * _WORDS], "little")
    return array("Q", array("I", sum_.to_bytes(4 * _WORDS, "little"))).tobytes()


@lru_cache(maxsize=256)
def _power_of_t(exponent: int) -> int:
    """Return t to the power of ``exponent``, modulo the polynomial."""
    result = 1
    for bit in bin(exponent)[2:]:
        # To square is to put a 0 before every bit, which is what a number in base 4 has.
        result = int(format(result, "b"), 4) << int(bit)
        result = _reduced(result)
    return result


def _reduced(polynomial: int) -> int:
    lower = _lower_terms()
    while high := polynomial >> _DEGREE:
        polynomial &= (1 << _DEGREE) - 1
        for power in lower:
            polynomial ^= high << power
    return polynomial


@cache
def _lower_terms() -> tuple[int, ...]:
    """Return the terms of the polynomial below the highest.

    Matsumoto and Nishimura, «Mersenne Twister» (1998), appendix A.
    """
    a, b = 1 << _WORDS ^ 1 << _MIDDLE, 1 << (_WORDS - 1) ^ 1 << (_MIDDLE - 1)
    powers = [1]
    for _ in range(31):
        powers.append(_product(powers[-1], b))
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
