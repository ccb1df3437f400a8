"""The shape of a convolution's output, which is computed without torch's own shape function."""

from __future__ import annotations

import random

import torch

from pytest_torchmem.operators.arguments import ConvolutionSettings
from pytest_torchmem.operators.convolution.convolution import convolution_shape


def test_it_is_that_of_the_kernel(chance: random.Random) -> None:
    compared = 0
    for _ in range(300):
        dims, groups = chance.randint(1, 3), chance.choice((1, 1, 2, 4))
        transposed = chance.random() < 0.4
        sizes = [chance.randint(1, 9) for _ in range(dims)]
        kernel = [chance.randint(1, 4) for _ in range(dims)]
        x = torch.empty(chance.randint(1, 3), chance.choice((4, 8)), *sizes)
        weight = torch.empty(chance.choice((4, 8)), chance.choice((1, 2, 4, 8)), *kernel)
        stride, padding, dilation = (
            [chance.randint(least, most) for _ in range(chance.choice((1, dims)))]
            for least, most in ((1, 3), (0, 2), (1, 2))
        )
        more = [min(stride) - 1 if transposed else 0] * dims
        try:
            real = torch.convolution(
                x, weight, None, stride, padding, dilation, transposed, more, groups
            )
        except RuntimeError:
            continue
        if not real.numel():  # on meta torch refuses what some of its kernels take
            continue
        settings = ConvolutionSettings(stride, padding, dilation, transposed, more, groups)
        assert convolution_shape(x.to("meta"), weight.to("meta"), settings).shape == real.shape
        compared += 1
    assert compared > 20
