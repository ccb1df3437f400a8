"""Copies and counts that CUDA kernels make beside their outputs, worked out from ATen's sources."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.operators.workspace_of import takes_nothing

LAST = torch.channels_last
BFLOAT, LONG = torch.bfloat16, torch.int64


# -- indices ---------------------------------------------------------------------------------------


def test_the_helper_of_moving_averages_is_not_among_the_fused_optimizers() -> None:
    aten = torch.ops.aten
    assert takes_nothing(aten._fused_adamw_.default, "cuda")
    assert not takes_nothing(aten._fused_moving_avg_obs_fq_helper.default, "cuda")


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda x: functional.channel_shuffle(x, 2),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
        lambda x: functional.max_unpool2d(x, torch.zeros_like(x, dtype=LONG), 2),
    ],
    ids=["channel_shuffle", "reflect", "replicate", "max_unpool2d"],
)
def test_what_is_contiguous_whatever_the_image_is(run: Callable[[Tensor], Tensor]) -> None:
    """native/ChanelShuffle.cpp, cuda/ReflectionPad.cu, ReplicationPadding.cu, MaxUnpooling.cu."""
    dense = []

    def step() -> None:
        x = torch.ones(2, 8, 4, 4, device="cuda").to(memory_format=LAST).requires_grad_()
        result = run(x)
        (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
        dense.append((result.is_contiguous(), gradient.is_contiguous()))

    trace(step, device="cuda", gpu="a100")
    assert dense[0][0]
    assert dense[0][1]


# -- batch norm ------------------------------------------------------------------------------------


@pytest.mark.parametrize("incoming", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize(
    ("dtype", "training"), [(BFLOAT, True), (BFLOAT, False), (torch.float32, False)]
)
def test_the_gradient_of_batch_norm_lies_as_its_input(
    dtype: torch.dtype, training: bool, layout: Any, incoming: Any
) -> None:
    """In training; in evaluation, cuDNN's too, it is contiguous. cuda/Normalization.cu."""
    dense = []

    def run() -> None:
        x = torch.ones(2, 8, 4, 4, dtype=dtype, device="cuda").contiguous(memory_format=layout)
        x.requires_grad_()
        y = nn.BatchNorm2d(8, device="cuda", dtype=dtype).train(training)(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach().contiguous(memory_format=incoming))
        dense.append(gradient.is_contiguous())

    trace(run, device="cuda", gpu="a100")
    assert dense == [not training or layout is not LAST]


def test_a_frozen_batch_norm_makes_convolutions_copy_gradients() -> None:
    """The gradient is contiguous, and cuDNN wants it as the image is."""
    profile = {}
    for training in (True, False):

        def run(training: bool = training) -> None:
            conv = nn.Conv2d(8, 8, 3, padding=1, bias=False, device="cuda", dtype=BFLOAT)
            norm = nn.BatchNorm2d(8, device="cuda", dtype=BFLOAT).train(training)
            conv.to(memory_format=LAST)
            x = torch.ones(2, 8, 32, 32, dtype=BFLOAT, device="cuda").to(memory_format=LAST)
            functional.relu(norm(conv(x))).sum().backward()

        allocations = trace(run, device="cuda", gpu="a100").timeline.allocations
        profile[training] = [
            one.nbytes
            for one in allocations
            if one.origin.operator == "aten::convolution_backward" and one.label == ""
        ]
    copy = 2 * 2 * 8 * 32 * 32
    assert profile[False].count(copy) == profile[True].count(copy) + 1


# -- storages --------------------------------------------------------------------------------------


def storages_of(run: Callable[[], Any]) -> list[int]:
    """Return the bytes of the storages under what ``run`` returns in a trace."""
    sizes: list[int] = []

    def step() -> None:
        outputs = run()
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        sizes.extend(tensor.untyped_storage().nbytes() for tensor in tensors)

    trace(step, device="cuda", gpu="a100")
    return sizes


def test_unique_values_keep_a_storage_for_all_elements() -> None:
    """UniqueCub.cu, ``compute_unique``: ``data_out`` and ``counts`` are resized to what is left."""

    def numbers(dtype: torch.dtype = LONG) -> Tensor:
        return torch.arange(1000, device="cuda").remainder(7).to(dtype)

    assert storages_of(lambda: numbers().unique()) == [8000]
    assert storages_of(lambda: numbers(torch.int32).unique(return_counts=True)) == [4000, 8000]
    both = storages_of(lambda: numbers().unique(return_inverse=True, return_counts=True))
    assert both == [8000, 8000, 8000]
    assert storages_of(lambda: (numbers() > 3).unique()) == [2]
    runs = storages_of(lambda: numbers().sort()[0].unique_consecutive(return_counts=True))
    assert runs == [8000, 8000]
    kept = []
    trace(lambda: kept.append(numbers().unique().tolist()), device="cuda")
    assert kept == [list(range(7))]


def test_folded_columns_keep_the_storage_of_the_columns() -> None:
    """Col2Im.cu: the output begins as large as the input."""
    columns = 4 * 2 * 144 * 1024

    def fold() -> Tensor:
        return functional.fold(torch.ones(2, 144, 1024, device="cuda"), (32, 32), 3, padding=1)

    def unfold() -> tuple[Tensor, Tensor]:
        x = torch.ones(2, 16, 32, 32, device="cuda", requires_grad=True)
        patches = functional.unfold(x, 3, padding=1)
        return patches, *torch.autograd.grad(patches.sum(), x)

    assert storages_of(fold) == [columns]
    assert storages_of(unfold) == [columns, columns]
