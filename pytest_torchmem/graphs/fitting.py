"""What fits on a GPU, and what would make a step smaller; polynomials of sizes.

A step of several sizes is what a function of the sizes returns, to be traced.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import torch
from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.profile import PEAK_FIELDS, MemoryProfile, Suggestion
from pytest_torchmem.targets.gpus import DEFAULT_GPU, find_gpu
from pytest_torchmem.tracing.layers import StandingGpu
from pytest_torchmem.tracing.trace import trace
from pytest_torchmem.units import parse_size

Build = Callable[..., Any]
Sizes = Mapping[str, int]
_MOST = 1 << 24


@dataclass(frozen=True, slots=True)
class Largest:
    """What fits: the largest size, its profile, and the error of the next one."""

    size: int
    """0 if not even ``start`` fits."""
    profile: MemoryProfile | None
    """``None`` if nothing fits."""
    error: torch.OutOfMemoryError | None
    """What the next larger size raises; ``None`` where ``most`` fits."""
    traces: int
    """How many steps were traced."""


def largest(
    build: Build,
    *,
    gpu: str | None = None,
    memory: int | str | None = None,
    size: str = "batch",
    start: int = 1,
    most: int = _MOST,
    fixed: Sizes | None = None,
    **options: Any,
) -> Largest:
    """Return the largest ``size`` whose step fits into the memory of ``gpu``, to the last one.

    ``build(batch=8)`` returns a module and its arguments, as for ``scaling``; ``size`` is the name
    of its argument, and ``fixed`` has the values of its others. ``memory`` replaces that of the GPU
    (``"20 GiB"``). Other ``options`` go to ``trace``. The result fits and one more does not: both
    were traced, and a larger size is taken to need more. Build the model on ``meta``
    (``with torch.device("meta")``): then neither needs memory.

    Raises ``UsageError`` without ``gpu`` and ``memory``, and whatever the step raises.
    """
    if gpu is None and memory is None:
        raise UsageError("largest() needs gpu= or memory=: something that the step has to fit in")
    if not isinstance(start, int) or not isinstance(most, int) or not 1 <= start <= most:
        raise UsageError(
            f"start={start!r}, most={most!r}: expected whole numbers, 1 <= start <= most"
        )
    if options.pop("device", "cuda") != "cuda":
        raise UsageError("largest() traces on fake cuda alone: leave out device=")
    others = {} if fixed is None else fixed
    if not isinstance(others, Mapping) or size in others:
        raise UsageError(
            f"fixed={fixed!r}: expected the values of the other sizes by name, without {size!r}"
        )
    search = _Search(build, size, others, {"gpu": gpu, "memory": memory, **options})
    good, bad = 0, most + 1
    guess = start
    while good + 1 < bad:
        if search.fits(guess):
            good = guess
        else:
            bad = guess
        if bad == start:
            break
        guess = search.next(good, bad)
    traces = len(search.profiles) + len(search.errors)
    return Largest(good, search.profiles.get(good), search.errors.get(bad), traces)


class _Search:
    """The traces so far, and a guess of where the limit lies."""

    def __init__(self, build: Build, size: str, fixed: Sizes, options: dict[str, Any]) -> None:
        self._build, self._size, self._fixed, self._options = build, size, fixed, options
        self.profiles: dict[int, MemoryProfile] = {}
        self.errors: dict[int, torch.OutOfMemoryError] = {}
        self._streak = 0
        """How many traces before the last one ended like it."""
        self._fitted = True

    def fits(self, value: int) -> bool:
        try:
            self.profiles[value] = trace_built(
                self._build, {**self._fixed, self._size: value}, device="cuda", **self._options
            )
        except torch.OutOfMemoryError as error:
            self.errors[value] = error.with_traceback(None)
        fitted = value in self.profiles
        self._streak = self._streak + 1 if fitted is self._fitted else 0
        self._fitted = fitted
        return fitted

    def next(self, good: int, bad: int) -> int:
        """Return a size between the largest that fits and the smallest that does not.

        Memory grows nearly linearly with most sizes, in each phase by as much as it does there:
        where the first of these lines meets the limit is tried. If that fits, what comes after it
        is tried in steps that double; if it does not, what is just below it, and then the middle of
        what is left.
        """
        if not good:
            return bad // 2
        if len(self.profiles) == 1:
            return min(2 * good, bad - 1)
        expected = self._on_lines(bad)
        if expected >= bad > _MOST:
            return 2 * good
        middle = max((good + bad) // 2, good + 1)
        if expected < bad:
            return max(expected, min(good + (1 << self._streak), middle))
        return middle if self._streak else max(bad - max((bad - good) // 16, 1), middle)

    def _on_lines(self, bad: int) -> int:
        """Return the last size within the limit, on lines through the two largest that fit.

        What the allocator reserves beyond what is alive is taken to stay the same.
        """
        one, two = sorted(self.profiles)[-2:]
        before, now = self.profiles[one], self.profiles[two]
        memory, gpu = self._options["memory"], find_gpu(self._options["gpu"] or DEFAULT_GPU)
        size = gpu.memory if memory is None else parse_size(memory)
        limit = size - min(gpu.context, size) - max((now.reserved_peak or 0) - now.peak, 0)
        found = bad
        for phase in PEAK_FIELDS:
            first, second = getattr(before, phase) or 0, getattr(now, phase) or 0
            if second > first:
                found = min(found, two + (limit - second) * (two - one) // (second - first))
        return found


def advise(
    target: Any, *args: Any, budget: int | str | None = None, **options: Any
) -> list[Suggestion]:
    """Return changes that lower the peak of a training step, the best first.

    The arguments are those of ``trace``, but that memory is unlimited. Every change is made while
    the step is traced again, and says what that saved: checkpoints of modules, functions in place,
    ``foreach=False`` and ``fused=True`` of the optimizer, ``set_to_none`` where gradients are set
    to zero, a cross entropy fused with its linear layer or in chunks, the forward in bfloat16
    (autocast), large buffers and conversions in a narrower type, and ``expandable_segments`` of the
    caching allocator (cuda, by what is reserved). With a ``budget`` (``"2 GiB"``) for the peak,
    as few modules are checkpointed as it takes, those of the fewest operations first, and what
    costs nothing is joined where no change is enough.

    Changes that fit the budget come first, those that cost the fewest operations before others.
    Changes that save nothing, and those that the step does not bear, are left out. Of a
    compiled step no function is put in place, and no type is changed but by autocast. Raises what
    ``trace`` raises for the step as it is, and ``UsageError`` for a ``budget`` that is no number of
    bytes.
    """
    options["memory"] = "unlimited"
    return trace(target, *args, **options).suggestions(budget)


Exponents = tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in the sizes of ``names``: coefficients by the exponents of these."""

    names: tuple[str, ...]
    terms: Mapping[Exponents, Fraction]
    """Without those that are 0."""

    def __call__(self, sizes: Sizes) -> Fraction:
        """Return its value."""
        values = [sizes[name] for name in self.names]
        return sum(
            (
                coefficient * math.prod(map(pow, values, exponents))
                for exponents, coefficient in self.terms.items()
            ),
            Fraction(0),
        )

    def degree(self, name: str) -> int:
        """Return the highest exponent of one size."""
        place = self.names.index(name)
        return max((exponents[place] for exponents in self.terms), default=0)

    def __add__(self, other: "Polynomial") -> "Polynomial":
        return total(self.names, (self, other))

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        highest_first = sorted(self.terms.items(), key=lambda item: (sum(item[0]), item[0]))[::-1]
        return " + ".join(
            "·".join([_number(coefficient), *self._factors(exponents)])
            for exponents, coefficient in highest_first
        ).replace("+ -", "- ")

    def term(self, exponents: Exponents) -> str:
        """Return the sizes of one term: ``"batch·sequence²"``, or ``"1"``."""
        return "·".join(self._factors(exponents)) or "1"

    def _factors(self, exponents: Exponents) -> list[str]:
        return [
            name + ("" if power == 1 else _SUPERSCRIPTS.get(power, f"^{power}"))
            for name, power in zip(self.names, exponents, strict=True)
            if power
        ]


_SUPERSCRIPTS = {2: "²", 3: "³", 4: "⁴"}


def _number(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{value}"


def total(names: tuple[str, ...], polynomials: Iterable[Polynomial]) -> Polynomial:
    terms: dict[Exponents, Fraction] = {}
    for polynomial in polynomials:
        for exponents, coefficient in polynomial.terms.items():
            terms[exponents] = terms.get(exponents, Fraction(0)) + coefficient
    return Polynomial(names, {key: value for key, value in terms.items() if value})


class Grid:
    """Values of sizes, all of them with all others, and the polynomials through any numbers there.

    With n values of a size these are of degree n - 1 in it at most (tensor product interpolation).
    """

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        self.names = tuple(values)
        self.values = tuple(tuple(sorted(set(one))) for one in values.values())
        points = product(*self.values)
        self.points = tuple(dict(zip(self.names, point, strict=True)) for point in points)
        self._bases = [_lagrange(one) for one in self.values]

    def through(self, numbers: Sequence[int]) -> Polynomial:
        """Return the polynomial that has ``numbers`` at the ``points``."""
        shape = [len(one) for one in self.values]
        terms = {
            places: Fraction(number)
            for places, number in zip(product(*map(range, shape)), numbers, strict=True)
            if number
        }
        for axis, basis in enumerate(self._bases):  # from values to coefficients, size by size
            turned: dict[Exponents, Fraction] = {}
            for places, number in terms.items():
                for power, coefficient in enumerate(basis[places[axis]]):
                    if coefficient:
                        key = (*places[:axis], power, *places[axis + 1 :])
                        turned[key] = turned.get(key, Fraction(0)) + coefficient * number
            terms = turned
        return Polynomial(self.names, {key: value for key, value in terms.items() if value})


def _lagrange(values: Sequence[int]) -> list[list[Fraction]]:
    """Return for each value the coefficients of the polynomial that is 1 there, 0 at the others."""
    basis = []
    for value in values:
        coefficients = [Fraction(1)]
        for other in values:
            if other == value:
                continue
            scale = Fraction(1, value - other)
            shifted = [Fraction(0), *coefficients]
            lower = [*coefficients, Fraction(0)]
            coefficients = [
                (high - other * low) * scale for high, low in zip(shifted, lower, strict=True)
            ]
        basis.append(coefficients)
    return basis


def trace_built(build: Build, sizes: Sizes, **options: Any) -> MemoryProfile:
    """Trace what ``build(**sizes)`` returns, with the options of ``trace``."""
    with gpu_seen(options.get("device"), options.get("gpu")):
        target, args, kwargs = built_at(build, sizes)
    return trace(target, *args, **{**kwargs, **options})


def gpu_seen(device: str | None, gpu: str | None) -> AbstractContextManager[None]:
    """Have the GPU of a trace be there, for what a program does before its step: it may put its
    model on cuda, and ask about the GPU. Nothing happens for ``"cpu"``.
    """
    if device != "cuda":
        return nullcontext()
    return StandingGpu(find_gpu(gpu or DEFAULT_GPU).name).on()


def refuse_unless_builds(build: Any, sizes: Iterable[str]) -> None:
    """Raise ``UsageError`` unless ``build`` is a function that takes these sizes by name."""
    if isinstance(build, nn.Module) or not callable(build):
        raise UsageError(
            f"build={type(build).__name__} object: expected a function of the sizes that returns a "
            "module and its arguments, such as: lambda batch: (model, torch.randn(batch, 8))"
        )
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # a builtin, which has none
        return
    try:
        signature.bind(**dict.fromkeys(sizes, 1))
    except TypeError as error:
        name = getattr(build, "__name__", type(build).__name__)
        raise UsageError(
            f"{name}{signature} is called with "
            f"{', '.join(f'{size}=' for size in sizes) or 'no arguments'}: {error}"
        ) from None


def written(sizes: Sizes) -> str:
    """Return sizes as a call has them: ``"batch=2, sequence=8"``."""
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def built_at(build: Build, sizes: Sizes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return what ``build(**sizes)`` does: a module or callable, and its arguments.

    It returns one of these, or a tuple of it and its arguments; a dictionary at the end of a tuple
    has keyword arguments. Raises ``UsageError`` for anything else.
    """
    refuse_unless_builds(build, sizes)
    built = build(**sizes)
    target, *args = built if isinstance(built, tuple) else (built,)
    if not isinstance(target, nn.Module) and not callable(target):
        own = getattr(build, "__name__", "")
        call = f"{own if own.isidentifier() else 'build'}({written(sizes)})"
        returned = "nothing" if target is None else type(target).__name__
        raise UsageError(
            f"{call} returned {returned}: expected a module or a function that runs a step, or a "
            "tuple of one and its arguments, such as: return model, x"
        )
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return target, tuple(args), kwargs
