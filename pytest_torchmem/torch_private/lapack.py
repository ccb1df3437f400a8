"""What the LAPACK that torch is linked with says of its work arrays, asked as torch asks it.

A query (``lwork = -1``) reads scalars, and writes sizes and no matrix. Functions are Fortran's: all
arguments are addresses, integers have 32 bits, as torch declares them
(native/BatchLinearAlgebra.cpp), and lengths of texts come last, which C's callers may leave out.
torch's builds with MKL for Linux have these functions in ``libtorch_cpu.so`` itself, others in
what it is linked with; where they are in neither, nothing is asked.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch

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
