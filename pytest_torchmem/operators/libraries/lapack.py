"""Sizes of LAPACK's work arrays, in elements, as the reference implementation answers a query.

Source: https://www.netlib.org/lapack, the routines' own formulas with the block size of ``ILAENV``.
MKL, which torch is linked with on x86, answers one element more and has block sizes of its own,
which are not documented; what it takes for matrices too small to be blocked is the same.
"""

from __future__ import annotations

import math

_BLOCK = 32
"""``ILAENV(1, ...)`` of the routines here."""

_SMALLEST_LEAF = 25
"""``SMLSIZ``: what divide and conquer does not divide any more."""


def _block(order: int) -> int:
    return _BLOCK if order > _BLOCK else 1


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
    return (2 + _block(order)) * order + 1, 1


def geev(order: int) -> int:
    """``sgeev``: eigenvalues of any matrix, with right eigenvectors."""
    return max(1, 2 * order + order * _BLOCK)


def gels(rows: int, columns: int, sides: int) -> int:
    """``sgels``: least squares by QR."""
    least = min(rows, columns)
    return max(1, least + max(least, sides) * _block(least))


def gelsy(rows: int, columns: int, sides: int) -> int:
    """``sgelsy``: least squares by QR with pivots."""
    least = min(rows, columns)
    block = _block(least)
    return max(least + 2 * columns + block * (columns + 1), 2 * least + block * sides)


def gelss(rows: int, columns: int, sides: int) -> int:
    """``sgelss``: least squares by singular values; its least size."""
    least = min(rows, columns)
    return max(1, 3 * least + max(2 * least, max(rows, columns), sides))


def gelsd(rows: int, columns: int, sides: int) -> tuple[int, int]:
    """``sgelsd``: least squares by singular values, divided; elements and integers."""
    least = min(rows, columns)
    if least == 0:
        return 1, 1
    levels = max(0, int(math.log2(least / (_SMALLEST_LEAF + 1))) + 1)
    shared = 2 * least * _SMALLEST_LEAF + 8 * least * levels + least * sides
    return 12 * least + shared + (_SMALLEST_LEAF + 1) ** 2, 3 * least * levels + 11 * least
