"""The shape of a convolution's output, which is computed without torch's own shape function."""

import random
import re
from typing import Any

import pytest
import torch

from pytest_torchmem.operators.calls import ConvolutionSettings
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


@pytest.mark.parametrize(
    ("input", "weight", "bias", "settings"),
    [
        ((2, 3, 9, 9), (5, 4, 3, 3), None, {}),
        ((2, 3, 9, 9), (4, 5, 3, 3), None, {"transposed": True}),
        ((2, 4, 9, 9), (5, 4, 3, 3), (4,), {}),
        ((2, 4, 9, 9), (4, 5, 3, 3), (4,), {"transposed": True}),
        ((2, 4, 9, 9), (3, 2, 3, 3), None, {"groups": 2}),
        ((2, 4, 9, 9), (4, 4, 3, 3), None, {"groups": 0}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"stride": (0, 0)}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"padding": (-1, -1)}),
        ((2, 4, 9, 9), (5, 4, 3, 3), None, {"dilation": (-1, -1)}),
        ((2, 4, 2, 2), (5, 4, 3, 3), None, {}),
    ],
)
def test_what_torch_does_not_take_is_refused_in_its_words(
    input: tuple[int, ...],
    weight: tuple[int, ...],
    bias: tuple[int, ...] | None,
    settings: dict[str, Any],
) -> None:
    shapes = [input, weight, bias]
    real = [None if shape is None else torch.zeros(shape) for shape in shapes]
    meta = [None if shape is None else torch.zeros(shape, device="meta") for shape in shapes]
    given = ConvolutionSettings(
        **{"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)} | settings
    )
    with pytest.raises(RuntimeError) as expected:
        torch.convolution(*real, *given._replace(output_padding=(0, 0)))
    with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
        convolution_shape(meta[0], meta[1], given, meta[2])
