"""Copies and counts that CUDA kernels make beside their outputs, worked out from ATen's sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.operators.reduction.buffers import sum_buffers
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.operators.workspace_of import takes_nothing
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import find_gpu
from tests.asked import workspace_of

A100 = find_gpu("a100")
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
BFLOAT, LONG = torch.bfloat16, torch.int64


def meta(*shape: int, dtype: torch.dtype = torch.float32, layout: Any = None) -> Tensor:
    """Return a tensor without data."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


def found(operator: str, outputs: Any, *args: Any, **kwargs: Any) -> Workspace:
    """Return what an operator takes."""
    return workspace_of(operator, A100, outputs, *args, **kwargs)


def taken(operator: str, outputs: Any, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """Return the requests of an operator of which they are exact."""
    workspace = found(operator, outputs, *args, **kwargs)
    assert workspace.confidence is Confidence.EXACT
    return workspace.requests


@pytest.fixture(params=[False, True], ids=["required", "warns"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic algorithms, for the length of a test: of others torch at least warns."""
    torch.use_deterministic_algorithms(True, warn_only=request.param)
    yield
    torch.use_deterministic_algorithms(False)


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_first", "elements"),
    # Three steps of 4 sequences, one of 2, two of 1. Where the batch is first, no part lies densely
    # but that of one sequence; else those of all sequences and of a single step do.
    [(True, 12 + 2), (False, 2)],
)
def test_packing_copies_the_parts_of_a_padded_sequence(batch_first: bool, elements: int) -> None:
    def pack() -> None:
        shape = (4, 6, 64) if batch_first else (6, 4, 64)
        x = torch.ones(shape, device="cuda")
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 3, 3]), batch_first)

    packed = 4 * 64 * (6 + 4 + 3 + 3)
    profile = trace(pack, device="cuda", gpu="a100")
    assert profile.peak == 4 * 4 * 6 * 64 + packed + 4 * 64 * elements


# -- indices ---------------------------------------------------------------------------------------


def test_a_choice_between_types_copies_what_has_another() -> None:
    mask, half, single = meta(64, dtype=torch.bool), meta(64, dtype=BFLOAT), meta(64)
    assert taken("where", single, mask, half, single) == (256,)
    assert taken("where", single, mask, single, single) == ()
    assert taken("where", single, meta(64, dtype=torch.uint8), single, single) == (64,)


def test_a_mean_of_scattered_values_counts_them() -> None:
    """Counts like the result, ones like the source, and where a count is zero."""
    into, source = meta(10, 4), meta(50, 4)
    index, rows = meta(50, 4, dtype=LONG), meta(50, dtype=LONG)
    assert taken("scatter_reduce", into, into, 0, index, source, "mean") == (800, 160, 40)
    assert taken("scatter_reduce", into, into, 0, index, source, "amax") == ()
    assert taken("index_reduce", into, into, 0, rows, source, "mean") == (160, 800, -800, 40)
    assert taken("index_reduce", into, into, 0, rows, source, "amax") == ()


@pytest.mark.usefixtures("deterministic")
def test_deterministic_scattering_puts_in_order() -> None:
    """As torch 2.13.0's CUDA code asks for an A100, without a GPU."""
    into, index, source = meta(100, 8), meta(5000, 8, dtype=LONG), meta(5000, 8)
    each, extremes = 320_000, (8, 8, 1, -1, 1, -1, -8, -8)
    rows = (*extremes, each, each, -each)
    columns = (8, 8, each, -each, *extremes[2:], each, each, -each, -each)
    sort = (each, each, each, 8, -8, 655_871)
    requests = (64, 8, -8, *rows, *columns, *sort)
    for operator in ("scatter", "scatter_add"):
        assert taken(operator, into, into, 0, index, source) == requests
    one = taken("scatter_add", meta(100), meta(100), 0, meta(5000, dtype=LONG), meta(5000))
    assert one == (*extremes, 40_000, 40_000, -40_000, *[40_000] * 3, 8, -8, 4607)
    given_back = (-655_871, *[-each] * 4, -64)
    mean = (*requests, *given_back, 160_000, 3200, *requests, *given_back, 800)
    assert taken("scatter_reduce", into, into, 0, index, source, "mean") == mean
    assert found("scatter_reduce", into, into, 0, index, source, "amax").is_nothing
    assert found("scatter", into, into, 0, index, 1.0).is_nothing
    assert found("index_copy", into, into, 0, meta(5, dtype=LONG), meta(5, 8)).requests


def test_scattering_takes_nothing_where_nothing_has_to_be_deterministic() -> None:
    into, index, source = meta(100, 8), meta(5000, 8, dtype=LONG), meta(5000, 8)
    assert taken("scatter", into, into, 0, index, source) == ()
    assert taken("scatter_add", into, into, 0, index, source) == ()
    assert taken("index_copy", into, into, 0, meta(5, dtype=LONG), meta(5, 8)) == ()


def test_indices_with_another_dimension_between_them_move_the_input() -> None:
    """``index_put`` with ``accumulate``: ``transposeToFrontAndInvPerm``."""
    into, index = meta(8, 16, 8), meta(100, dtype=LONG)
    beside = found("_index_put_impl_", into, into, [index, index], meta(100, 8), True)
    apart = found("_index_put_impl_", into, into, [index, None, index], meta(100, 16), True)
    assert 4 * 8 * 16 * 8 in apart.requests
    assert 4 * 8 * 16 * 8 not in beside.requests


def test_whether_all_are_equal_is_a_mask_and_its_reduction() -> None:
    assert taken("equal", True, meta(10, 10), meta(10, 10))[:2] == (100, 1)
    assert taken("equal", False, meta(10, 10), meta(10)) == ()


def test_a_selection_along_a_dimension_is_made_from_a_dense_copy() -> None:
    x = meta(8, 16)
    outputs = (meta(8), meta(8, dtype=LONG))
    for operator, *arguments in (("kthvalue", 2, 1), ("median", 1), ("nanmedian", 1)):
        assert taken(operator, outputs, x, *arguments) == ()
        assert taken(operator, outputs, meta(16, 8).t(), *arguments) == (512,)


def test_more_than_4096_of_the_largest_are_sorted_beside_those_that_were_found() -> None:
    outputs = (meta(50, 5000), meta(50, 5000, dtype=LONG))
    requests = taken("topk", outputs, meta(50, 20_000), 5000)
    assert taken("topk", outputs, meta(50, 20_000), 5000, sorted=False) == requests[:18]
    pairs = (2_000_000, 2_000_000, 1_000_000, 3_092_991, -3_092_991, -1_000_000, 70_143, -70_143)
    sorting = (2_000_000, 1_000_000, *pairs, -2_000_000, -2_000_000, 2_000_000)
    assert requests[18:] == sorting


def test_boundaries_of_another_type_are_converted() -> None:
    places, single, double = meta(100, dtype=LONG), meta(100), meta(8, dtype=torch.float64)
    assert taken("bucketize", places, single, meta(8)) == ()
    assert taken("bucketize", places, single, double) == (800,)
    assert taken("searchsorted", places, double, single) == (800,)
    assert taken("searchsorted", places, double[::2], 0.5) == (8, 32)
    assert taken("bucketize", places, 0.5, double) == (8,)
    assert taken("bucketize", places, 0.5, single) == (8, 4)


def test_sums_of_powers_are_added_up_as_norms_are() -> None:
    tensors = [meta(200_000), meta(10)]
    outputs = [meta(), meta()]
    assert taken("_foreach_powsum", outputs, tensors, 2) == (2 * 4 * 4,)
    assert taken("_foreach_norm", outputs, tensors, 2) == (2 * 4 * 4,)


def test_the_helper_of_moving_averages_is_not_among_the_fused_optimizers() -> None:
    aten = torch.ops.aten
    assert takes_nothing(aten._fused_adamw_.default, "cuda")
    assert not takes_nothing(aten._fused_moving_avg_obs_fq_helper.default, "cuda")


# -- losses and cells ------------------------------------------------------------------------------


def test_a_loss_reads_dense_probabilities() -> None:
    """Loss.cu, ``expect_contiguous``: of what is sliced or transposed there is a copy."""
    target, weight = meta(8, dtype=LONG), meta(16)
    whole, turned = meta(8, 16), meta(16, 8).t()
    outputs = (meta(), meta())
    assert taken("nll_loss_forward", outputs, whole, target, weight, 1, -100) == ()
    assert taken("nll_loss_forward", outputs, turned, target, weight, 1, -100) == (4 * 8 * 16,)
    backward = (meta(), turned, target, weight, 1, -100, meta())
    assert taken("nll_loss_backward", whole, *backward) == (4 * 8 * 16,)


def test_group_norm_of_vectors_has_the_sums_of_channels_too() -> None:
    x, statistics, weight = meta(4, 32), meta(4, 8), meta(32)
    arguments = (x, x, statistics, statistics, weight, 4, 32, 1, 8)
    both, groups = (4 * 4 * 32,) * 2, (4 * 4 * 8,) * 2
    outputs = (x, weight, weight)
    taken_by = "native_group_norm_backward"
    assert taken(taken_by, outputs, *arguments, [True, True, True]) == (*both, *groups)
    assert taken(taken_by, outputs, *arguments, [False, True, True]) == both


def test_a_gru_cell_adds_up_the_gradients_of_its_biases() -> None:
    gates = meta(8192, 3 * 256)
    outputs = (gates, gates, meta(8192, 256), meta(768), meta(768))
    kept = meta(8192, 5 * 256)
    expected = sum_buffers(A100, gates.shape, 0, gates.dtype)
    assert expected
    arguments = (meta(8192, 256), kept)
    assert taken("_thnn_fused_gru_cell_backward", outputs, *arguments, True) == expected
    assert taken("_thnn_fused_gru_cell_backward", outputs, *arguments, False) == ()


# -- distances and sets ----------------------------------------------------------------------------


def test_the_gradients_of_distances_are_made_for_every_pair() -> None:
    first, second, grad = meta(500, 3), meta(4, 600, 3), meta(4, 500, 600)
    assert taken("_cdist_forward", grad, first, second, 1.0, None) == (4 * 4 * 500 * 3,)
    backward = taken("_cdist_backward", meta(4, 500, 3), grad, first, second, 1.0, grad)
    assert backward[:2] == (4 * 4 * 500 * 3, 4 * 4 * 600 * 500 * 3)
    points = meta(100, 3)
    assert taken("_pdist_forward", meta(4950), points, 2.0) == ()
    assert taken("_pdist_backward", points, meta(4950), points, 2.0, meta(4950))[0] == 99 * 1200


# -- images ----------------------------------------------------------------------------------------


def test_interpolation_copies_what_it_cannot_read() -> None:
    """UpSample*.cu: the kernels for channels last ask for 4 or 16 channels."""
    few, some, many = (meta(2, channels, 8, 8, layout=LAST) for channels in (3, 4, 16))
    for x, copies in ((few, (4 * 2 * 3 * 256, 4 * 2 * 3 * 64)), (some, ()), (many, ())):
        out = meta(2, x.shape[1], 16, 16, layout=LAST)
        assert taken("upsample_nearest2d", out, x, [16, 16]) == copies
        assert taken("upsample_bilinear2d", out, x, [16, 16], False) == ()
        grad = (x, out, [16, 16], list(x.shape))
        back = tuple(reversed(copies))
        assert taken("upsample_nearest2d_backward", *grad) == back
        assert taken("upsample_bilinear2d_backward", *grad, False) == back
        dense = (4 * out.numel(),)
        assert taken("upsample_bicubic2d_backward", *grad, False) == dense
        assert taken("_upsample_bilinear2d_aa_backward", *grad, False) == dense
        assert taken("_upsample_bilinear2d_aa", out, x, [16, 16], False) == (*dense, 4 * x.numel())


def test_interpolation_of_volumes_is_dense() -> None:
    x, out = meta(2, 8, 4, 4, 4, layout=LAST_3D), meta(2, 8, 8, 8, 8, layout=LAST_3D)
    small, large = 4 * x.numel(), 4 * out.numel()
    assert taken("upsample_nearest3d", out, x, [8, 8, 8]) == (large, small)
    assert takes_nothing(torch.ops.aten.upsample_trilinear3d.default, "cuda")
    sizes = ([8, 8, 8], list(x.shape))
    assert taken("upsample_trilinear3d_backward", x, out, *sizes, False) == (small, large)
    assert taken("upsample_nearest3d_backward", x, out, *sizes) == (large,)
    volume, places = x.transpose(2, 3), meta(2, 8, 4, 4, 4, dtype=LONG)
    unpooled = (meta(2, 8, 8, 8, 8), volume, places, [8, 8, 8], [2], [0])
    assert taken("max_unpool3d", *unpooled) == (small,)


def test_pooling_copies_what_it_cannot_read() -> None:
    x, out = meta(2, 8, 16, 16, layout=LAST), meta(2, 8, 4, 4, layout=LAST)
    indices = meta(2, 8, 4, 4, dtype=LONG, layout=LAST)
    small, large = 4 * out.numel(), 4 * x.numel()
    assert taken("adaptive_max_pool2d", (out, indices), x, [4, 4]) == (large, small, 2 * small)
    backward = taken("adaptive_max_pool2d_backward", x, out, x, indices)
    assert backward == (small, 2 * small, large)
    assert taken("_adaptive_avg_pool2d_backward", x, out.contiguous(), x) == ()
    volume = meta(2, 8, 4, 4, 4, layout=LAST_3D)
    assert taken("max_pool3d_with_indices", (volume, volume), volume, [2]) == ()
    rest = ([2], [2], [0], [1], False, volume)
    assert taken("max_pool3d_with_indices_backward", volume, volume, volume, *rest) == ()
    dense = volume.contiguous()
    backward = taken("max_pool3d_with_indices_backward", volume, dense, volume, *rest)
    assert backward == (4 * dense.numel(),)


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


def test_several_dimensions_are_rolled_one_after_the_other() -> None:
    """As the windows of a Swin transformer are; ``roll_common``."""
    x = meta(2, 8, 8, 16)
    assert taken("roll", x, x, [1], [1]) == ()
    assert taken("roll", x, x, [1]) == ()
    assert taken("roll", x, x.transpose(1, 2), [1], [1]) == (4 * x.numel(),)
    assert taken("roll", x, x, [-3, -3], [1, 2]) == (4 * x.numel(),)
    assert taken("roll", x, x, [1, 1, 1], [0, 1, 2]) == (2 * 4 * x.numel(),)


def test_windows_that_overlap_are_added_up_by_position() -> None:
    assert taken("unfold_backward", meta(1000), meta(499, 4), [1000], 0, 4, 2) == (8000,)
    assert taken("unfold_backward", meta(1000), meta(500, 2), [1000], 0, 2, 2) == ()


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


def test_batch_norm_saves_statistics_in_evaluation_too() -> None:
    def run() -> None:
        layer = nn.BatchNorm1d(64, device="cuda").eval()
        layer(torch.ones(4, 64, device="cuda", requires_grad=True))

    profile = trace(run, device="cuda", gpu="a100")
    kept = [
        one.nbytes
        for one in profile.timeline.allocations
        if one.origin.operator == "aten::native_batch_norm"
    ]
    assert kept == [4 * 4 * 64, 4 * 64, 4 * 64]


def test_the_backward_of_batch_norm_adds_up_channels() -> None:
    """Channels last and in evaluation; else one kernel for what is (batch, channels, pixels)."""
    weight, none = meta(8), meta(0)
    saved = (meta(8), meta(8))

    def backward(x: Tensor, grad: Tensor, train: bool, mask: tuple[bool, ...], *own: Any) -> Any:
        statistics = (weight, weight, *(own or saved))
        name = "native_batch_norm_backward"
        requests = taken(name, (x, None, None), grad, x, weight, *statistics, train, 0, mask)
        return tuple(one for one in requests if isinstance(one, int) and one)

    every, alone = (True, True, True), (True, False, False)
    image, last = meta(2, 8, 4, 4), meta(2, 8, 4, 4, layout=LAST)
    assert backward(image, image, True, every) == ()
    assert backward(last, last, True, every) == (32, 32)
    assert backward(last, image, False, every) == (32, 32)
    assert backward(last, image, False, alone) == ()
    assert backward(last, image, False, every, none, none) == (32, 32, 32)
    cut = meta(2, 8, 4, 6)[..., :4]
    assert backward(image, cut, True, every) == (4 * math.prod(cut.shape),)
    assert backward(image, meta(2, 8, 1, 1).expand(2, 8, 4, 4), True, every) == ()


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


# -- against torch's CUDA code without a GPU, 2.13.0+cu130 -----------------------------------------


@pytest.mark.parametrize(
    ("program", "x", "forward"),
    [
        # ATen makes the index of ``repeat`` on the host.
        (lambda x: x.repeat(2, 3), torch.ones(100, 100), 280_000),
        (lambda x: x.tile(2, 1, 3), torch.ones(10, 10), 2800),
        (nn.GroupNorm(3, 6, dtype=BFLOAT), torch.ones(4, 6, 5, dtype=BFLOAT), 840),
        (torch.bernoulli, torch.ones(2, 3, 4, dtype=BFLOAT), 192),
        (lambda x: 2.0**x, torch.ones(100), 808),
        (lambda x: x @ x.mT, torch.ones(5, 10, dtype=torch.complex64).conj(), 8_520_680),
        (lambda x: x.norm(2, dim=1), torch.ones(5, 1, dtype=torch.complex64), 100),
        (lambda x: x.norm(2, 0), torch.ones(()), 8),
    ],
    ids=[
        "repeat",
        "tile",
        "group norm",
        "bernoulli",
        "pow",
        "conjugate",
        "norm",
        "norm of a number",
    ],
)
def test_forward_peaks(program: Callable[[Tensor], Tensor], x: Tensor, forward: int) -> None:
    model = program if isinstance(program, nn.Module) else nn.Module()
    if model is not program:
        model.forward = program
    profile = trace(model, x, device="cuda", gpu="a100-80gb", backward=False)
    assert profile.forward_peak == forward
