"""Windows of signals (``torch.hann_window``); native/TensorFactories.cpp.

All are made of positions by operators in place, or by one kernel. A periodic window is made with
one element more, which its storage keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.registry import aten, operator

_in_place = operator(
    *aten("""
        hann_window hann_window.periodic hamming_window hamming_window.periodic
        hamming_window.periodic_alpha hamming_window.periodic_alpha_beta
    """)
)
_bartlett = operator(*aten("bartlett_window bartlett_window.periodic"))
_blackman = operator(*aten("blackman_window blackman_window.periodic"))
_kaiser = operator(*aten("kaiser_window kaiser_window.periodic kaiser_window.beta"))


@_in_place.meta()
@_bartlett.meta()
@_blackman.meta()
@_kaiser.meta()
def window(window_length: int, dtype: torch.dtype | None = None, periodic: bool = True) -> Tensor:
    """The positions' own memory, or the like; of one element or none they are not computed."""
    made = torch.empty(_positions(window_length, periodic), dtype=dtype, device="meta")
    return made.narrow(0, 0, window_length)


@_in_place.workspace("cpu")
def factor(outputs: Tensor, window_length: int) -> int:
    """A number that all are multiplied by; hamming_window."""
    return converted(1.0, outputs.dtype) if window_length > 1 else 0


@_bartlett.workspace("cpu")
def whole_factor(outputs: Tensor, window_length: int) -> int:
    """The second half is multiplied by a whole number; bartlett_window."""
    return converted(-1, outputs.dtype) if window_length > 1 else 0


@_in_place.workspace("cuda")
@_bartlett.workspace("cuda")
def nothing() -> int:
    """Kernels are given numbers as they are."""
    return 0


@_blackman.workspace("cpu")
def terms_and_number(outputs: Tensor, window_length: int, periodic: bool = True) -> int:
    """The terms, and what is added last."""
    return sum(terms(outputs, window_length, periodic)) + factor(outputs, window_length)


@_blackman.workspace("cuda")
def terms(outputs: Tensor, window_length: int, periodic: bool = True) -> tuple[int, ...]:
    """The positions, two cosines of them and their difference, all until the sum is made."""
    return positions(outputs, window_length, periodic) * 4


@_kaiser.workspace()
def positions(outputs: Tensor, window_length: int, periodic: bool = True) -> tuple[int, ...]:
    """What one kernel computes the window of."""
    size = _positions(window_length, periodic) * outputs.element_size()
    return (size,) if window_length > 1 else ()


def _positions(window_length: int, periodic: bool) -> int:
    return window_length + (1 if periodic and window_length > 1 else 0)
