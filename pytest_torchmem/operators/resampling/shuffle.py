"""Pixels to channels and back: native/PixelShuffle.cpp, ChanelShuffle.cpp.

The CPU has kernels that keep the memory format of the input; CUDA reshapes and permutes
(``math_pixel_shuffle``, ``math_channel_shuffle``), and the output is contiguous.
"""

from __future__ import annotations

import torch

from pytest_torchmem.operators.formats import CONTIGUOUS, SUGGESTED, copied, shaped_by
from pytest_torchmem.operators.registry import operator

for _overload in (
    torch.ops.aten.channel_shuffle.default,
    torch.ops.aten.pixel_shuffle.default,
    torch.ops.aten.pixel_unshuffle.default,
):
    _shuffle = operator(_overload.name())
    _shuffle.meta("cpu")(shaped_by(_overload, SUGGESTED))
    _shuffle.meta("cuda")(shaped_by(_overload, CONTIGUOUS))
    _shuffle.workspace("cpu")(copied(self=SUGGESTED))
