"""Polynomials with exact coefficients in named sizes, through the values at a grid of sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

Exponents = tuple[int, ...]


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in the sizes of ``names``: coefficients by the exponents of these."""

    names: tuple[str, ...]
    terms: Mapping[Exponents, Fraction]
    """Without those that are 0."""

    def __call__(self, sizes: Mapping[str, int]) -> Fraction:
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

    def __add__(self, other: Polynomial) -> Polynomial:
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
    """Return the sum of polynomials in the same sizes."""
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
        self.points = tuple(
            dict(zip(self.names, point, strict=True)) for point in product(*self.values)
        )
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
