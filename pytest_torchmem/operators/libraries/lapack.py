"""Sizes of LAPACK's work arrays, in elements, as the reference implementation answers a query.

Source: https://www.netlib.org/lapack, the routines' own formulas with the block size of ``ILAENV``.
MKL, which torch is linked with on x86, has block sizes of its own, which are not documented; what
it takes for matrices too small to be blocked is the same.
"""

from __future__ import annotations

import math
import struct

_BLOCK = 32
"""``ILAENV(1, ...)`` of the routines here."""

_SMALLEST_LEAF = 25
"""``SMLSIZ``: what divide and conquer does not divide any more."""


def _block(order: int) -> int:
    return _BLOCK if order > _BLOCK else 1


def taken(answer: int, single: bool) -> int:
    """Return the elements that torch takes where LAPACK asks for ``answer``.

    LAPACK answers in a floating-point number, and torch takes what the next one is above
    (native/BatchLinearAlgebra.cpp, lapack_work_to_int).
    """
    if not single:
        return max(1, math.ceil(math.nextafter(answer, math.inf)))
    (bits,) = struct.unpack("I", struct.pack("f", answer))
    (following,) = struct.unpack("f", struct.pack("I", bits + 1))
    return max(1, math.ceil(float(following)))


def geqrf(rows: int, columns: int) -> int:
    """``sgeqrf``: a QR decomposition."""
    return max(1, columns * _block(min(rows, columns)))


def orgqr(columns: int, reflectors: int) -> int:
    """``sorgqr``: the matrix that Householder reflectors stand for."""
    return max(1, columns * _block(reflectors))


def ormqr(other: int, reflectors: int) -> int:
    """``sormqr``: reflectors applied to a matrix whose other side is ``other``."""
    return max(1, other * _block(reflectors))


def syevd(order: int, vectors: bool) -> tuple[int, int]:
    """``ssyevd``: eigenvalues of a symmetric matrix; elements and integers."""
    if order <= 1:
        return 1, 1
    if vectors:
        return 1 + 6 * order + 2 * order * order, 3 + 5 * order
    return max(1 + 2 * order, (2 + _block(order)) * order), 1


def heevd(order: int, vectors: bool) -> tuple[int, int, int]:
    """``cheevd``: those of a Hermitian matrix; elements, real numbers and integers."""
    if order <= 1:
        return 1, 1, 1
    if vectors:
        squared = order * order
        return 2 * order + squared, 1 + 5 * order + 2 * squared, 3 + 5 * order
    return (1 + _block(order)) * order, order, 1


def geev(order: int, of_complex: bool) -> int:
    """``sgeev`` and ``cgeev``: eigenvalues of any matrix, with right eigenvectors."""
    return max(1, (1 if of_complex else 2) * order + order * _BLOCK)


def gels(rows: int, columns: int, sides: int) -> int:
    """``sgels``: least squares by QR."""
    least = min(rows, columns)
    return max(1, least + max(least, sides) * _block(least))


def gelsy(rows: int, columns: int, sides: int) -> int:
    """``sgelsy``: least squares by QR with pivots."""
    least = min(rows, columns)
    block = _block(least)
    return max(least + 2 * columns + block * (columns + 1), 2 * least + block * sides)


def gelss(rows: int, columns: int, sides: int, of_complex: bool) -> int:
    """``sgelss`` and ``cgelss``: least squares by singular values; its least size."""
    least = min(rows, columns)
    return max(1, (2 if of_complex else 3) * least + max(2 * least, max(rows, columns), sides))


def gelsd(rows: int, columns: int, sides: int) -> tuple[int, int]:
    """``sgelsd``: least squares by singular values, divided; elements and integers."""
    least = min(rows, columns)
    if least == 0:
        return 1, 1
    levels = _levels(least)
    shared = 2 * least * _SMALLEST_LEAF + 8 * least * levels + least * sides
    return 12 * least + shared + (_SMALLEST_LEAF + 1) ** 2, 3 * least * levels + 11 * least


def gelsd_of_complex(rows: int, columns: int, sides: int) -> tuple[int, int, int]:
    """``cgelsd``: elements, real numbers and integers."""
    least = min(rows, columns)
    if least == 0:
        return 1, 1, 1
    levels = _levels(least)
    shared = 2 * least * _SMALLEST_LEAF + 8 * least * levels + 3 * _SMALLEST_LEAF * sides
    last = max((_SMALLEST_LEAF + 1) ** 2, least * (1 + sides) + 2 * sides)
    return 2 * least + least * sides, 10 * least + shared + last, 3 * least * levels + 11 * least


def _levels(order: int) -> int:
    return max(0, int(math.log2(order / (_SMALLEST_LEAF + 1))) + 1)
