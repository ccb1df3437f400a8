"""Sizes of LAPACK's work arrays, in elements, as native/BatchLinearAlgebraKernel.cpp has them.

For the machine that runs the trace, the LAPACK that torch is linked with is asked, as torch asks
it. A query (``lwork = -1``) reads scalars, and writes sizes and no matrix. Functions are Fortran's:
all arguments are addresses, integers have 32 bits, as torch declares them
(native/BatchLinearAlgebra.cpp), and lengths of texts come last, which C's callers may leave out.
torch's builds with MKL for Linux have these functions in ``libtorch_cpu.so`` itself, others in
what it is linked with; where they are in neither, nothing is asked.

For other machines it is the reference implementation's answer (https://www.netlib.org/lapack, the
routines' own formulas with the block size of ``ILAENV``): MKL, which torch is linked with on x86,
has block sizes of its own, which are not documented and depend on the number of threads; what it
takes for matrices too small to be blocked is the same.
"""

import ctypes
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch

from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.names import torch_library

_LETTERS = {torch.float32: "s", torch.float64: "d", torch.complex64: "c", torch.complex128: "z"}
_OF_COMPLEX = {"orgqr": "ungqr", "ormqr": "unmqr", "syevd": "heevd"}
"""What a routine is called for complex numbers, where that is not the same."""
_LARGEST = 2**31 - 1
_ROOM = 64
"""Bytes that stand for a matrix or a vector, of which a query reads and writes none."""


class Argument(Enum):
    """What a query hands over besides texts and numbers."""

    MATRIX = "a matrix or vector"
    ASKED = "the length -1"
    WORK = "where the length of the work array is written"
    REALS = "where that of one of real numbers is written"
    INTEGERS = "where that of one of integers is written"
    INFO = "where it is written whether the query was right"


class Lengths(NamedTuple):
    """What a query says of work arrays, as numbers of the types in which it does."""

    work: float
    reals: float = 0.0
    integers: int = 0


@cache
def lengths(
    routine: str, dtype: torch.dtype, arguments: tuple[str | int | Argument, ...], threads: int
) -> Lengths | None:
    """Return what ``routine`` says on so many threads; None where it cannot be asked. ``routine``
    has no letter for its type: ``geqrf``.
    """
    letter = _LETTERS.get(dtype)
    if letter is None or any(isinstance(one, int) and one > _LARGEST for one in arguments):
        return None
    if dtype.is_complex:
        routine = _OF_COMPLEX.get(routine, routine)
    function = getattr(torch_library(), f"{letter}{routine}_", None)
    if function is None:
        return None
    number = ctypes.c_float if letter in "sc" else ctypes.c_double
    work, reals = (number * (2 if dtype.is_complex else 1))(), number()
    integers, info = ctypes.c_int(), ctypes.c_int(-1)
    written = {
        Argument.WORK: work,
        Argument.REALS: reals,
        Argument.INTEGERS: integers,
        Argument.INFO: info,
    }
    given = [written[one] if one in written else _handed(one) for one in arguments]
    of_texts = [ctypes.c_size_t(1) for one in arguments if isinstance(one, str)]
    function.restype = None
    with _threads_of_mkl(threads):
        function(*map(ctypes.byref, given), *of_texts)
    if info.value != 0:
        return None
    return Lengths(float(work[0]), float(reals.value), integers.value)


def _handed(argument: str | int | Argument) -> Any:
    if isinstance(argument, str):
        return ctypes.c_char(argument.encode())
    if argument is Argument.ASKED:
        return ctypes.c_int(-1)
    if isinstance(argument, Argument):
        return ctypes.create_string_buffer(_ROOM)
    return ctypes.c_int(argument)


@contextmanager
def _threads_of_mkl(threads: int) -> Iterator[None]:
    """Let MKL take it that it runs on so many threads, on which its blocks depend: as
    ``torch.set_num_threads`` does for the calling thread (ATen/ParallelOpenMP.cpp).
    """
    set_to = getattr(torch_library(), "MKL_Set_Num_Threads_Local", lambda _: 0)
    before = set_to(threads)
    try:
        yield
    finally:
        set_to(before)


_BLOCK = 32
"""``ILAENV(1, ...)`` of the routines here, but for the one below."""
_BLOCK_OF_SYTRF = 64

_SMALLEST_LEAF = 25
"""``SMLSIZ``: what divide and conquer does not divide any more."""

_MATRIX, _ASKED, _INFO = Argument.MATRIX, Argument.ASKED, Argument.INFO
_REALS, _INTEGERS = Argument.REALS, Argument.INTEGERS
_LENGTH = (Argument.WORK, Argument.ASKED)


def _block(order: int) -> int:
    return _BLOCK if order > _BLOCK else 1


@dataclass(frozen=True, slots=True)
class Lapack:
    """LAPACK on a host, for matrices of one type."""

    host: Host
    dtype: torch.dtype

    def geqrf(self, rows: int, columns: int) -> int:
        """A QR decomposition; apply_geqrf."""
        given = (rows, columns, _MATRIX, max(1, rows), _MATRIX, *_LENGTH, _INFO)
        reference = columns * _block(min(rows, columns))
        return max(columns, self._rounded(self._ask("geqrf", *given, work=reference).work))

    def orgqr(self, rows: int, columns: int, reflectors: int) -> int:
        """The matrix that Householder reflectors stand for; apply_orgqr."""
        sizes = (rows, columns, reflectors)
        given = (*sizes, _MATRIX, max(1, rows), _MATRIX, *_LENGTH, _INFO)
        return self._rounded(self._ask("orgqr", *given, work=columns * _block(reflectors)).work)

    def ormqr(self, left: bool, transpose: bool, rows: int, columns: int, reflectors: int) -> int:
        """Reflectors applied to a matrix from a side; apply_ormqr."""
        transposed = "C" if self.dtype.is_complex else "T"
        modes = ("L" if left else "R", transposed if transpose else "N")
        factors = (_MATRIX, max(1, rows if left else columns), _MATRIX)
        matrix = (_MATRIX, max(1, rows))
        given = (*modes, rows, columns, reflectors, *factors, *matrix, *_LENGTH, _INFO)
        reference = (columns if left else rows) * _block(reflectors)
        return max(1, int(self._ask("ormqr", *given, work=reference).work))

    def syevd(self, order: int, vectors: bool) -> tuple[int, int, int]:
        """Elements, integers and, of complex ones, reals for eigenvalues; apply_lapack_eigh."""
        is_complex = self.dtype.is_complex
        matrix = (order, _MATRIX, max(1, order), _MATRIX)
        others: tuple[Argument, ...] = (_INTEGERS, _ASKED, _INFO)
        if is_complex:
            others = (_REALS, _ASKED, *others)
        least = _reference_syevd(order, vectors, is_complex)
        job = "V" if vectors else "N"
        found = self._ask("syevd", job, "L", *matrix, *_LENGTH, *others, **least._asdict())
        length = self._rounded(found.reals) if is_complex else 0
        return self._rounded(found.work), max(1, found.integers), length

    def geev(self, order: int, vectors: bool) -> int:
        """Eigenvalues of any matrix, perhaps with right eigenvectors; apply_linalg_eig."""
        is_complex, leading = self.dtype.is_complex, max(1, order)
        values = (_MATRIX,) if is_complex else (_MATRIX, _MATRIX)
        made = (_MATRIX, 1, _MATRIX, leading if vectors else 1)
        jobs = ("N", "V" if vectors else "N")
        arrays = (order, _MATRIX, leading, *values, *made)
        given = (*jobs, *arrays, *_LENGTH, *self._others())
        reference = (1 if is_complex else 2) * order + order * _BLOCK
        return self._rounded(self._ask("geev", *given, work=reference).work)

    def sytrf(self, order: int, hermitian: bool) -> int:
        """Factors of a symmetric matrix; apply_ldl_factor."""
        routine = "hetrf" if hermitian and self.dtype.is_complex else "sytrf"
        given = ("L", order, _MATRIX, max(1, order), _MATRIX, *_LENGTH, _INFO)
        return max(1, int(self._ask(routine, *given, work=order * _BLOCK_OF_SYTRF).work))

    def gels(self, rows: int, columns: int, sides: int) -> int:
        """Least squares by QR; apply_lstsq."""
        least = min(rows, columns)
        given = ("N", *_system(rows, columns, sides), *_LENGTH, _INFO)
        reference = least + max(least, sides) * _block(least)
        return self._rounded(self._ask("gels", *given, work=reference).work)

    def gelsy(self, rows: int, columns: int, sides: int) -> int:
        """Least squares by QR with pivots."""
        least, block = min(rows, columns), _block(min(rows, columns))
        reference = max(least + 2 * columns + block * (columns + 1), 2 * least + block * sides)
        given = (*_system(rows, columns, sides), *[_MATRIX] * 3, *_LENGTH, *self._others())
        return self._rounded(self._ask("gelsy", *given, work=reference).work)

    def gelss(self, rows: int, columns: int, sides: int) -> int:
        """Least squares by singular values; the reference is its least size."""
        least = min(rows, columns)
        parts = 2 if self.dtype.is_complex else 3
        reference = parts * least + max(2 * least, max(rows, columns), sides)
        given = (*_system(rows, columns, sides), *[_MATRIX] * 3, *_LENGTH, *self._others())
        return self._rounded(self._ask("gelss", *given, work=reference).work)

    def gelsd(self, rows: int, columns: int, sides: int) -> tuple[int, int, int]:
        """Least squares by singular values, divided: elements, integers, reals of complex ones."""
        is_complex = self.dtype.is_complex
        others = (*((_REALS,) if is_complex else ()), _INTEGERS, _INFO)
        given = (*_system(rows, columns, sides), *[_MATRIX] * 3, *_LENGTH, *others)
        least = _reference_gelsd(rows, columns, sides, is_complex)
        found = self._ask("gelsd", *given, **least._asdict())
        return self._rounded(found.work), max(1, found.integers), max(1, int(found.reals))

    def _others(self) -> tuple[Argument, ...]:
        return (_MATRIX, _INFO) if self.dtype.is_complex else (_INFO,)

    def _ask(
        self,
        routine: str,
        *given: str | int | Argument,
        work: float,
        reals: float = 0,
        integers: int = 0,
    ) -> Lengths:
        """Return what the host's own LAPACK says, or else the reference."""
        found = None
        if self.host.is_this_machine:
            found = lengths(routine, self.dtype, given, self.host.threads)
        return found or Lengths(work, reals, integers)

    def _rounded(self, length: float) -> int:
        """``lapack_work_to_int``: the next number of the matrices' precision, rounded up."""
        if self.dtype in (torch.float64, torch.complex128):
            return max(1, math.ceil(math.nextafter(length, math.inf)))
        (bits,) = struct.unpack("i", struct.pack("f", length))
        above: float = struct.unpack("f", struct.pack("i", bits + 1))[0]
        return max(1, math.ceil(above))


def _system(rows: int, columns: int, sides: int) -> tuple[int | Argument, ...]:
    """A matrix and right sides, which have room for the solution."""
    sizes = (rows, columns, sides)
    return (*sizes, _MATRIX, max(1, rows), _MATRIX, max(1, rows, columns))


def _reference_syevd(order: int, vectors: bool, is_complex: bool) -> Lengths:
    """``ssyevd``, ``cheevd``."""
    if order <= 1:
        return Lengths(1, 1, 1)
    squared, block = order * order, _block(order)
    integers = 3 + 5 * order if vectors else 1
    if is_complex and vectors:
        return Lengths(2 * order + squared, 1 + 5 * order + 2 * squared, integers)
    if is_complex:
        return Lengths((1 + block) * order, order, integers)
    if vectors:
        return Lengths(1 + 6 * order + 2 * squared, 0, integers)
    return Lengths(max(1 + 2 * order, (2 + block) * order), 0, integers)


def _reference_gelsd(rows: int, columns: int, sides: int, is_complex: bool) -> Lengths:
    """``sgelsd``, ``cgelsd``."""
    least = min(rows, columns)
    if least == 0:
        return Lengths(1, 1, 1)
    levels = max(0, int(math.log2(least / (_SMALLEST_LEAF + 1))) + 1)
    integers = 3 * least * levels + 11 * least
    shared = 2 * least * _SMALLEST_LEAF + 8 * least * levels
    leaf = (_SMALLEST_LEAF + 1) ** 2
    if is_complex:
        reals = 10 * least + shared + 3 * _SMALLEST_LEAF * sides
        last = max(leaf, least * (1 + sides) + 2 * sides)
        return Lengths(2 * least + least * sides, reals + last, integers)
    return Lengths(12 * least + shared + least * sides + leaf, 0, integers)
