"""Formulas of CUDA workspaces against figures worked out by hand from the sources of ATen.

The figures follow from the named files alone, but for those of which a test says that GPUs took
them: these are in recordings that others published (benchmarks/truth/published/sources.json).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.operators.attention.fused import Shape, efficient_backward_bytes, flash_splits
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.libraries.cublas import blas_buffer
from pytest_torchmem.operators.matmul.products import cublas_copy
from pytest_torchmem.operators.reduction.buffers import sum_buffers
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace import ALL, Workspace, as_workspace
from pytest_torchmem.operators.workspace_of import takes_nothing
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.targets.gpus import Gpu, find_gpu, gpu_names
from tests.asked import workspace_of

MIB = 2**20
FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
EXACT, BOUNDED, UNKNOWN = Confidence.EXACT, Confidence.BOUNDED, Confidence.UNKNOWN
A100, H100 = find_gpu("a100"), find_gpu("h100")


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def found(operator: str, outputs: Any, *args: Any, gpu: Gpu = A100, **kwargs: Any) -> Workspace:
    """Return what an operator takes."""
    return workspace_of(operator, gpu, outputs, *args, **kwargs)


# -- reductions: Reduce.cuh ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "shape", "dims", "dtype", "expected"),
    [
        # Columns: 128 = 32 threads of 4 outputs, 128 / 32 rows of them. 1024 / 4 / 256 values a
        # thread decide whether blocks share an output, 2048 / 128 blocks a multiprocessor how many.
        ("h100", (8192, 4096), [0], FLOAT, (132 * MIB, 4 * 32)),
        ("a100", (8192, 4096), [0], FLOAT, (108 * MIB, 4 * 32)),
        ("l4", (8192, 4096), [0], FLOAT, (44 * MIB, 4 * 32)),
        ("t4", (8192, 4096), [0], FLOAT, (20 * MIB, 4 * 32)),
        ("h100", (8192, 768), [0], FLOAT, (48 * MIB, 4 * 6)),
        ("h100", (1024, 768), [0], FLOAT, (6 * MIB, 4 * 6)),
        ("h100", (1024, 768), [0], BFLOAT, (6 * MIB, 4 * 6)),
        ("h100", (32768, 16384), [0], FLOAT, (256 * MIB, 4 * 128)),
        ("h100", (512, 768), [0], FLOAT, ()),
        # Rows: a block of 512 threads, each with 4 elements at once, makes one output.
        ("a100", (8192, 4096), [1], FLOAT, ()),
        ("a100", (64, 3, 224, 224), None, FLOAT, (4 * 432, 4)),
        ("a100", (4, 5), None, FLOAT, ()),
        ("a100", (0, 5), [0], FLOAT, ()),
        ("a100", (), None, FLOAT, ()),
    ],
)
def test_sums(
    gpu: str,
    shape: tuple[int, ...],
    dims: list[int] | None,
    dtype: torch.dtype,
    expected: tuple[int, ...],
) -> None:
    assert sum_buffers(find_gpu(gpu), shape, dims, dtype) == expected


def test_channels_last_bias_gradients_take_much_more_than_contiguous_ones() -> None:
    """16 threads of 4 outputs in a block of 128, and 16 such blocks on each multiprocessor."""
    shape = (32, 64, 112, 112)
    grad = meta(*shape).to(memory_format=torch.channels_last)
    assert sum_buffers(A100, shape, (0, 2, 3), FLOAT, grad.stride()) == (
        4 * 64 * (108 * 16) * (16 * 4),
        4,
    )
    assert sum_buffers(A100, shape, (0, 2, 3), FLOAT) == (4 * 64 * 7, 4 * 64)  # 7 blocks each


def test_an_input_beyond_32_bits_is_reduced_in_parts() -> None:
    """Reduce.cuh, ``AccumulationBuffer``: 16 bits cannot hold what the parts add up."""
    parts = sum_buffers(A100, (2**16, 2**14), [0], BFLOAT)
    assert len(parts) == 2
    assert sum_buffers(A100, (2**17, 2**14), [0], BFLOAT) == (4 * 2**14, *parts)
    parts = sum_buffers(A100, (2**15, 2**14), [0], FLOAT)
    assert sum_buffers(A100, (2**16, 2**14), [0], FLOAT) == parts


def test_what_a_reduction_accumulates() -> None:
    rows = meta(8192, 512)
    base = sum(found("sum", meta(512), rows, [0]).requests)
    (_, semaphores) = found("sum", meta(512), rows, [0]).requests
    partial = base - semaphores
    assert found("amax", meta(512), rows, [0]).requests == (partial, semaphores)
    # A value and an index, of 16 bytes; Welford's mean, sum, count and fraction, 16 as well.
    values = (meta(512), meta(512, dtype=torch.int64))
    assert found("max", values, rows, 0).requests == (4 * partial, semaphores)
    assert found("argmax", values[1], rows, 0).requests == (4 * partial, semaphores)
    assert found("var", meta(512), rows, [0], correction=1).requests == (4 * partial, semaphores)
    assert found("linalg_vector_norm", meta(512), rows, 2, [0]).requests == (partial, semaphores)


def test_sums_of_another_type_are_copied_first() -> None:
    """ReduceOpsUtils.h, ``make_reduction_from_out_ty``; not from 16 bits to float."""
    mask = meta(100, 10, dtype=torch.bool)
    assert found("sum", meta(dtype=torch.int64), mask).requests == (8 * 1000,)
    assert not found("sum", meta(), meta(100, 10, dtype=HALF), None, dtype=FLOAT).requests
    double = meta(dtype=torch.float64)
    assert found("sum", double, meta(100, 10), None, dtype=torch.float64).requests == (8000,)


# -- attention -------------------------------------------------------------------------------------


def flash(batch: int, heads: int, queries: int, size: int, keys: int = 0, groups: int = 1) -> Any:
    """Return query, key and value of one attention in bfloat16."""
    query = meta(batch, heads, queries, size, dtype=BFLOAT)
    key = meta(batch, heads // groups, keys or queries, size, dtype=BFLOAT)
    return query, key, key


FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


def flash_backward(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return what the backward takes of a gradient that lies as transformers' do."""
    batch, heads, queries, size = query.shape
    grad = meta(batch, queries, heads, size, dtype=BFLOAT).transpose(1, 2)
    return bytes_of(found(f"{FLASH}_backward", None, grad, query, key, value, grad))


def test_flash_backward() -> None:
    """flash_api.cpp, ``mha_bwd``: ``softmax_d`` and ``dq_accum``."""
    rows = 8 * 12 * 1024
    assert flash_backward(*flash(8, 12, 1024, 64)) == (4 * rows, 4 * rows * 64)
    # Rows are padded to 128 and heads to 32; from 224 on to 256.
    assert flash_backward(*flash(1, 2, 100, 40)) == (4 * 2 * 128, 4 * 2 * 128 * 64)
    assert flash_backward(*flash(1, 2, 128, 200))[1] == 4 * 2 * 128 * 256


def test_flash_backward_of_grouped_heads_repeats_the_keys() -> None:
    rows = 32 * 8192
    repeated = 8192 * 32 * 128 * 2
    expected = (4 * rows, 4 * rows * 128, repeated, repeated)
    assert flash_backward(*flash(1, 32, 8192, 128, groups=4)) == expected


def test_flash_backward_copies_what_is_not_dense() -> None:
    query, key, value = flash(2, 4, 128, 64)
    by_head = meta(2, 4, 128, 64, dtype=BFLOAT)
    whole = by_head.numel() * 2
    requests = bytes_of(found(f"{FLASH}_backward", None, by_head, query, key, value, by_head))
    assert requests[:2] == (whole, whole)


def test_flash_forward_splits_the_keys_where_work_is_short() -> None:
    """``num_splits_heuristic``: 8 heads of 8 blocks on 2 * 132 slots, 2 blocks of 256 keys."""
    query, key, value = flash(1, 8, 512, 64)
    assert found(FLASH, None, query, key, value, 0.0, gpu=H100).requests == (
        2 * 4 * 8 * 512,
        2 * 4 * 8 * 512 * 64,
    )
    assert bytes_of(found(FLASH, None, query, key, value, 0.1, gpu=H100)) == (16, -16)
    assert not found(FLASH, None, *flash(8, 32, 512, 64), gpu=H100).requests


def test_one_query_of_grouped_heads_is_taken_for_a_sequence() -> None:
    query, key, value = flash(1, 32, 1, 128, keys=4096, groups=4)
    splits = flash_splits(H100, 1, 4, 4096, 8, 128)
    assert splits > 1
    rows = 4 * splits * 8 * 4
    requests = found(FLASH, None, query, key, value, gpu=H100).requests
    assert requests == (rows, rows * 128)


def bytes_of(workspace: Workspace) -> tuple[int, ...]:
    """Return the requests of a workspace beside the outputs."""
    return tuple(one for one in workspace.requests if isinstance(one, int) and one)


def test_memory_efficient_backward() -> None:
    """kernel_backward.h, ``workspace_elements_gq``: 64 x 64 floats and 16 bytes for each block."""
    blocks = (1024 // 64) * 1
    delta, own = 4 * 8 * 12 * 1024, 8 * 12 * blocks * (4 + 64 * 64) * 4
    half = efficient_backward_bytes(A100, BFLOAT, Shape(8, 12, 1024, 1024, 64, 64))
    assert half.confidence is EXACT
    assert bytes_of(half) == (delta, own)
    # In float the sum of rows is no part of the kernel, and its product is freed before the kernel.
    full = efficient_backward_bytes(A100, FLOAT, Shape(8, 12, 1024, 1024, 64, 64))
    assert bytes_of(full) == (delta * 64, delta, delta, -delta * 64, own)


def test_memory_efficient_backward_keeps_keys_in_memory_for_large_heads() -> None:
    """``kOutputInRF`` is false beyond 128: up to 200 / (batch * heads) splits of 64 keys."""
    shape = (1, 4, 256, 1024)
    splits = min(1024 // 64, 200 // 4)
    keys = 2 * splits * 64 * 256
    queries = (256 // 128) * (256 // 64) * (4 + 128 * 64)
    expected = (4 * 4 * 256, 4 * (keys + queries) * 4)
    assert bytes_of(efficient_backward_bytes(A100, HALF, Shape(*shape, 256, 256))) == expected


def test_where_shared_memory_decides_the_larger_kernel_is_a_limit() -> None:
    """128 queries and keys in registers, or 64 of each and the keys' gradients in memory."""
    shape = (2, 8, 512, 512)
    certain = efficient_backward_bytes(A100, HALF, Shape(*shape, 128, 128))
    limit = efficient_backward_bytes(find_gpu("rtx-5090"), HALF, Shape(*shape, 128, 128))
    assert (certain.confidence, limit.confidence) == (EXACT, BOUNDED)
    rows = 4 * 16 * 512
    assert bytes_of(certain) == (rows, 4 * 16 * (512 // 128) * (4 + 128 * 128))
    keys, queries = 2 * 512 * 128, (128 // 64) * (512 // 64) * (4 + 64 * 64)
    assert bytes_of(limit) == (rows, 4 * 16 * (keys + queries))


def test_memory_efficient_backward_makes_the_gradient_dense() -> None:
    """attention_backward.cu, ``_efficient_attention_backward``: by query, then by head."""
    query = meta(2, 4, 64, 32)
    args = (query, query, query, None, query, meta(2, 4, 64), meta(), meta(), 0.0, [True] * 4)
    by_head = found(f"{EFFICIENT}_backward", None, query, *args)
    by_query = found(f"{EFFICIENT}_backward", None, meta(2, 64, 4, 32).transpose(1, 2), *args)
    assert by_head.nbytes - by_query.nbytes == query.numel() * 4


def test_volta_sums_the_rows_of_large_heads_before() -> None:
    """``kKernelComputesDelta``: two casts to float, their product, its sum, and that dense."""
    shape, sums = (8, 32, 1024, 1024), 4 * 8 * 32 * 1024
    large = efficient_backward_bytes(find_gpu("v100"), HALF, Shape(*shape, 256, 256))
    assert bytes_of(large)[:3] == (3 * sums * 256, sums, sums)
    t4 = efficient_backward_bytes(find_gpu("t4"), HALF, Shape(*shape, 256, 256))
    keys, queries = 2 * 64 * 256, (256 // 64) * (1024 // 64) * (4 + 64 * 64)
    assert bytes_of(t4) == (sums, 4 * 8 * 32 * (keys + queries))


def test_memory_efficient_forward_adds_large_heads_up_in_float() -> None:
    query = meta(2, 4, 64, 256, dtype=HALF)
    out = (meta(2, 64, 4, 256, dtype=HALF).transpose(1, 2),)
    assert found(EFFICIENT, out, query, query, query, None, True).requests == (4 * query.numel(),)
    small = meta(2, 4, 64, 128, dtype=HALF)
    assert not found(EFFICIENT, (small,), small, small, small, None, True).requests


# -- embeddings and indices ------------------------------------------------------------------------


def test_sums_by_index_are_sorted() -> None:
    """Indexing.cu, ``index_put_with_sort_kernel``: indices checked, wrapped, sorted by 7 bits."""
    table, index = meta(100, 16), meta(4096, dtype=torch.int64)
    put = found("_index_put_impl_", table, table, [index], meta(4096, 16), True)
    assert put.confidence is EXACT
    each, sort = 8 * 4096, cub.radix_sort(A100, 4096, 8, 8, bits=7)
    extremes = (8, 8, 1, -1, 1, -1, -8, -8)
    assert tuple(one for one in put.requests if abs(one) <= 8) == extremes
    assert put.requests[-7:] == (each, each, -each, each, each, each, sort)
    assert found("_index_put_impl_", table, table, [index], meta(4096, 16)).is_nothing
    expanded = found("_index_put_impl_", table, table, [index], meta(16), True)
    assert sum(expanded.requests) - sum(put.requests) == 4096 * 16 * 4


@pytest.mark.parametrize(("number", "recorded"), [(512, 1), (4096, 72_191), (8192, 138_751)])
def test_the_sort_of_index_put_takes_what_gpus_took(number: int, recorded: int) -> None:
    """Wedsonlin, MAGMA27/assignment2-systems, torch 2.11: a gradient of 10,000 rows."""
    table, index = meta(10_000, 16), meta(number, dtype=torch.int64)
    put = found("_index_put_impl_", table, table, [index], meta(number, 16), True)
    assert put.requests[-4:] == (*[8 * number] * 3, recorded)


def test_a_sum_of_everything_takes_what_a_gpu_took() -> None:
    """JasperSolt/EoR_NN: 144 blocks, as 72 multiprocessors of 1,024 threads have at once."""
    turing = Gpu("turing", "Turing", (7, 5), 24 * 2**30, 72, 1024)
    assert sum_buffers(turing, (7_864_320 // 4,), None, FLOAT) == (576, 4)


def test_the_backward_of_efficient_attention_takes_what_a_gpu_took() -> None:
    """cranberrii/ftcourse: one sequence of 1,000, 32 heads of 64, in float."""
    taken = efficient_backward_bytes(find_gpu("a100"), FLOAT, Shape(1, 32, 1000, 1000, 64, 64))
    assert bytes_of(taken)[-1] == 8_396_800


def test_indices_that_lie_differently_are_made_dense() -> None:
    """TensorAdvancedIndexing.cpp, ``AdvancedIndex``, of a CUDA tensor."""
    rows, columns = meta(8, 1, dtype=torch.int64), meta(8, 4, dtype=torch.int64)
    assert found("index", meta(8, 4), meta(9, 9), [rows, columns]).requests == (8 * 32, ALL)
    assert found("index", meta(8, 4), meta(9, 9), [columns, columns]).requests == (ALL,)


# -- normalisation, softmax, losses ----------------------------------------------------------------


def test_layer_norm_backward_of_many_short_rows() -> None:
    """layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``: beyond 65,536 rows."""

    def backward(rows: int, columns: int) -> tuple[int, ...]:
        x, weight, row = meta(rows, columns), meta(columns), meta(rows, 1)
        grads = (x, weight, weight)
        args = (x, x, [columns], row, row, weight, weight, [True] * 3)
        return bytes_of(found("native_layer_norm_backward", grads, *args))

    assert not backward(65_536, 64)
    assert not backward(100_000, 4096)
    blocks = min(32_768 // 2, 100_000 // 32)
    partial = blocks * 64 * 4
    assert backward(100_000, 64)[:3] == (partial, partial, 64 * 4)
    x, weight, row = meta(100_000, 64), meta(64), meta(100_000, 1)
    args = (x, x, [64], row, weight, [True, True])
    rms = found("_fused_rms_norm_backward", (x, weight), *args)
    assert bytes_of(rms)[:2] == (partial, 64 * 4)


def test_group_norm() -> None:
    x, c = meta(4, 32, 8, 8), meta(32)
    forward = found("native_group_norm", (x,), x, c, c, 4, 32, 64, 8, 1e-5)
    assert forward.requests == (4 * 32 * 4,) * 2
    args = (x, x, meta(4, 8), meta(4, 8), c, 4, 32, 64, 8, [True] * 3)
    backward = found("native_group_norm_backward", (x, c, c), *args)
    assert backward.requests == (4 * 32 * 4, 4 * 32 * 4, 4 * 8 * 4, 4 * 8 * 4, 4 * 32 * 4)


def test_softmax_backward_multiplies_first() -> None:
    x = meta(4, 8, 512, 512)
    assert found("_softmax_backward_data", x, x, x, -1, FLOAT).requests == (x.numel() * 4,)
    assert found("_log_softmax_backward_data", x, x, x, -1, FLOAT).is_nothing
    turned, expanded = x.transpose(2, 3), meta(1).expand(4, 8, 512, 512)
    whole = x.numel() * 4
    assert found("_softmax_backward_data", x, turned, x, -1, FLOAT).requests == (whole,) * 2
    assert found("_softmax_backward_data", x, expanded, x, -1, FLOAT).requests == (whole,)


def test_losses_are_made_before_they_are_added_up() -> None:
    x = meta(100, 10)
    assert found("mse_loss", meta(), x, x).requests == (4000,)
    assert found("mse_loss", x, x, x, 0).is_nothing
    # The output is as large as the input, and only its shape is made that of a number.
    assert found("binary_cross_entropy", meta(), x, x, None, 1).requests == (4,)


def test_histograms_look_for_their_bounds() -> None:
    """SummaryOps.cu: a range that is given, as by counts of experts, takes nothing."""
    x = meta(64)
    assert found("histc", meta(8), x, 8, 0, 7).is_nothing
    assert found("histc", meta(8), x, 8).requests == (4, 4, -4, -4)
    across = found("histc", meta(8), meta(8, 8).t(), 8)
    assert across.requests == (4, 4, 256, -256, -4, -4)


def test_margin_losses_sum_the_losses_of_samples() -> None:
    """MultiMarginLoss.cu, MultiLabelMarginCriterion.cu: dense copies and a sample's loss each."""
    x, turned, labels = meta(6, 4), meta(4, 6).t(), meta(6, dtype=torch.long)
    targets = meta(6, 4, dtype=torch.long)
    assert found("multi_margin_loss", meta(), x, labels).requests == (24,)
    assert found("multi_margin_loss", meta(), turned, labels).requests == (96, 24)
    assert found("multi_margin_loss", meta(6), x, labels, reduction=0).is_nothing
    assert found("multilabel_margin_loss_forward", meta(), turned, targets, 1).requests == (96, 24)
    assert found("multi_margin_loss_backward", x, meta(), x, labels, 1, 1.0).is_nothing


@pytest.mark.parametrize(
    ("window", "requests"),
    [("hann", ()), ("bartlett", ()), ("kaiser", (260,)), ("blackman", (260,) * 4)],
)
def test_windows_are_made_of_their_positions(window: str, requests: tuple[int, ...]) -> None:
    """native/TensorFactories.cpp; a periodic window has one element more."""
    assert found(f"{window}_window", meta(64), 64).requests == requests
    assert found(f"{window}_window", meta(1), 1).is_nothing


def test_ctc_loss_backward_has_another_table() -> None:
    probabilities, table = meta(50, 4, 20), meta(4, 50, 21)
    targets = meta(4, 10, dtype=torch.int64)
    args = (meta(4), probabilities, targets, [50] * 4, [10] * 4, meta(4), table, 0)
    requests = found("_ctc_loss_backward", probabilities, *args).requests
    assert requests == (32, 32, 32, table.numel() * 4, ALL)


# -- products --------------------------------------------------------------------------------------


def test_matrices_that_cublas_cannot_read_are_copied() -> None:
    """Blas.cpp, ``prepare_matrix_for_cublas``."""
    assert cublas_copy(meta(8, 16)) == 0
    assert cublas_copy(meta(8, 16).t()) == 0
    assert cublas_copy(meta(8, 32)[:, :16]) == 0
    assert cublas_copy(meta(8, 32)[:, ::2]) == 8 * 16 * 4
    assert cublas_copy(meta(1, 1).expand(8, 16)) == 8 * 16 * 4
    assert cublas_copy(meta(4, 8, 16)) == 0
    assert cublas_copy(meta(4, 8, 32)[..., ::2]) == 4 * 8 * 16 * 4
    for shape in ((8, 16), (4, 8, 16)):
        conjugate = torch.zeros(shape, dtype=torch.complex64, device="meta").conj()
        assert cublas_copy(conjugate) == conjugate.nbytes
        assert cublas_copy(conjugate.mT) == 0
        assert cublas_copy(conjugate[..., ::2]) == conjugate.nbytes // 2


def test_products_of_groups_are_cutlass_on_hopper() -> None:
    """GroupedBlas.cpp, ``_grouped_mm_cuda``."""
    x, weights = meta(64, 32, dtype=BFLOAT), meta(4, 32, 16, dtype=BFLOAT)
    assert found("_grouped_mm", None, x, weights, gpu=H100).confidence is UNKNOWN
    assert found("_grouped_mm", None, x, weights).kept == (blas_buffer(A100),)


def test_scaled_products() -> None:
    """ScaledBlas.cpp: cuBLASLt with a scale for each matrix, CUTLASS with one for each row."""
    x = meta(64, 32, dtype=torch.float8_e4m3fn)
    tensor = found("_scaled_mm", None, x, x.t(), meta(1), meta(1), gpu=H100)
    rows = found("_scaled_mm", None, x, x.t(), meta(64, 1), meta(1, 64), gpu=H100)
    assert (tensor.confidence, rows.confidence) == (EXACT, UNKNOWN)
    assert tensor.kept == rows.kept == (blas_buffer(H100),)


# -- sorting ---------------------------------------------------------------------------------------


def test_sorting_is_in_place_up_to_4096_elements() -> None:
    """Sort.cpp, ``should_use_small_sort``, ``fillSliceWithIndex``."""
    pair = (meta(8, 4096), meta(8, 4096, dtype=torch.int64))
    assert found("sort", pair, meta(8, 4096)) == Workspace((8 * 4096,))
    long = (meta(1, 5000), meta(1, 5000, dtype=torch.int64))
    assert found("sort", long, meta(1, 5000)).requests == (5000 * 8, 71_167, -71_167)


def test_long_slices_of_topk_are_looked_at_by_several_blocks() -> None:
    """TensorTopK.cu, ``mbtopk``; as torch 2.13.0's CUDA code asks for an A100, without a GPU."""
    pair = (meta(50, 3), meta(50, 3, dtype=torch.int64))
    assert found("topk", pair, meta(8, 1000), 5).is_nothing
    blocks = (200, 400, 400, 307_200, 51_200, 2400, 2400, 1279, -1279, 1279, -1279)
    assert found("topk", pair, meta(50, 20_000), 3).requests[:11] == blocks


# -- what holds for all ----------------------------------------------------------------------------

shapes = st.lists(st.sampled_from([1, 2, 3, 8, 33, 128, 1000, 4096]), min_size=1, max_size=4)


@given(
    st.sampled_from(gpu_names()),
    shapes,
    st.data(),
    st.sampled_from([FLOAT, BFLOAT, torch.float64]),
)
def test_reductions_take_what_their_blocks_can_use(
    name: str, shape: list[int], data: st.DataObject, dtype: torch.dtype
) -> None:
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    gpu = find_gpu(name)
    buffers = sum_buffers(gpu, shape, sorted(dims), dtype)
    assert buffers == sum_buffers(gpu, shape, sorted(dims, reverse=True), dtype)
    assert all(size > 0 for size in buffers)
    if buffers and math.prod(shape) < 2**28:
        partial, semaphores = buffers
        inputs = math.prod(shape[dim] for dim in dims)
        outputs = math.prod(shape) // inputs
        accumulator = max(4, dtype.itemsize)
        assert semaphores % 4 == 0
        assert semaphores <= 4 * outputs
        assert partial % (accumulator * outputs) == 0
        # A block adds up 16 values of a thread at least, and outputs have room for 512 threads.
        assert partial <= accumulator * outputs * 512 * -(-inputs // 16)


@given(
    st.sampled_from(gpu_names()),
    st.integers(1, 8),
    st.integers(1, 32),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.integers(1, 32),
)
def test_attention_takes_no_negative_bytes_and_more_for_more(
    name: str, batch: int, heads: int, queries: int, keys: int, size: int
) -> None:
    gpu, shape, size = find_gpu(name), (batch, heads, queries, keys), 8 * size
    splits = flash_splits(gpu, batch, queries, keys, heads, size)
    assert 1 <= splits <= min(128, 2 * gpu.multiprocessors)
    for dtype in (HALF, FLOAT):
        one = efficient_backward_bytes(gpu, dtype, Shape(*shape, size, size))
        twice = efficient_backward_bytes(
            gpu, dtype, Shape(batch, heads, 2 * queries, keys, size, size)
        )
        assert 0 < one.nbytes <= twice.nbytes


CUB = {
    "t4": """12373247 10250239 9147903 4182783 7167 2250239 7167 1199103 21759 16381439 5119
        13311 5119 3327 23551 3583 13311 367103 11519 51199 1279""",
    "a100": """12342527 10598399 9460223 4136703 2559 2598399 1791 1321983 21759 16284159 3071
        5119 5119 3327 23551 17663 4351 269823 11519 13055 1279""",
    "rtx-3090": """12342527 10465279 9360383 4136703 7167 2465279 7167 1255423 21759 16284159 5119
        13311 5119 3327 23551 10239 13311 269823 11519 51199 1279""",
    "h100": """12200191 10187007 299519 4157183 2047 2110207 2303 108031 21759 16240127 3583
        2815 5119 3327 23551 21503 2815 225791 10751 4351 1279""",
    "b200": """12200191 10187007 299519 4157183 2303 2138879 2303 108031 21759 16240127 3583
        2815 5119 3327 23551 24063 3071 225791 5119 4351 1279""",
    "rtx-5090": """12200191 10187007 299519 4157183 2303 2138879 2303 108031 21759 16240127 3583
        2815 5119 3327 23551 20735 3071 225791 5119 4351 1279""",
}
"""What torch 2.13.0's code for CUDA 13.0 asks for, without a GPU, for a million elements: sorted
as float, bfloat16 and bool; unique float, int16, int8 with counts and int64 with an inverse; summed
up in float, bfloat16 and complex64; the nonzero ones of float; a gradient of ten embeddings by
frequency."""


@pytest.mark.parametrize("name", CUB)
def test_cub_takes_what_its_policies_say(name: str) -> None:
    gpu, n = find_gpu(name), 1_000_000
    computed = [
        *(cub.radix_sort(gpu, n, size, 8) for size in (4, 2, 1)),
        *(cub.radix_sort(gpu, n, 4, single=True), cub.distinct(gpu, n, 4)),
        *(cub.radix_sort(gpu, n, 2), cub.distinct(gpu, n, 2)),
        *(cub.radix_sort(gpu, n, 1), cub.run_lengths(n)),
        *(cub.radix_sort(gpu, n, 8, 8), cub.running_count(gpu, n), cub.distinct(gpu, n, 8)),
        *(cub.scan(n, 4), cub.scan(n, 2, primitive=False), cub.scan(n, 8, primitive=False)),
        *(cub.reduce(gpu, n, 4), cub.flagged(gpu, n)),
        *(cub.radix_sort(gpu, n, 8, 8, bits=4), cub.scan_by_key(gpu, n, 8)),
        *(cub.distinct_keys(gpu, n, 8), cub.scan(10, 8)),
    ]
    assert computed == [int(one) for one in CUB[name].split()]


@pytest.mark.parametrize("name", ["add", "add_", "relu_", "cat", "copy_", "zeros", "dropout"])
def test_operators_that_take_nothing(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    overload = getattr(packet, packet.overloads()[0])
    assert takes_nothing(overload, "cuda") == (name != "dropout")


@pytest.mark.parametrize("name", ["linalg_eig"])
def test_operators_of_which_nothing_is_known(name: str) -> None:
    overload = getattr(torch.ops.aten, name).default
    assert spec_of(overload).cuda.workspace is None
    assert not takes_nothing(overload, "cuda")


def test_unknown_is_only_what_no_source_tells() -> None:
    query = meta(2, 4, 64, 64, dtype=BFLOAT)
    assert found("_scaled_dot_product_cudnn_attention", [None], query).confidence is UNKNOWN
    assert takes_nothing(torch.ops.aten.native_dropout.default, "cuda")


class Silent:
    """A cuDNN that knows nothing."""

    def ask(self, question: object) -> None:
        """Return no workspace."""


def test_a_gradient_of_attention_is_copied_where_it_lies_otherwise() -> None:
    """MHA.cpp, ``same_strides``: those of dimensions of size 1 do not count."""
    query = meta(1, 4, 64, 64, dtype=BFLOAT)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    function = spec_of(operator).on("cuda").workspace
    assert function is not None

    def copied(gradient: Tensor) -> int:
        rest = (query, query, query, query, meta(1, 4, 64, 1), *[meta(0)] * 2, *[None] * 3)
        given = (gradient, *rest, 64, 64, 0.0, False)
        taken = function(given, {}, machine=H100, outputs=None, cudnn=Silent())
        return sum(as_workspace(taken, "").requests)

    assert copied(query) == copied(query.as_strided(query.shape, (7, *query.stride()[1:]))) == 0
    assert copied(query.transpose(1, 2).contiguous().transpose(1, 2)) == query.numel() * 2


@pytest.mark.parametrize(("channels", "told"), [(64, 221_668), (256, 201_544), (2048, 655_488)])
def test_batch_norm_of_cudnn_has_a_bound(channels: int, told: int) -> None:
    """Of the plans that cuDNN 9.20 lists for a batch norm on an A100, the largest workspace."""
    x = meta(32, channels, 14, 14, dtype=torch.float16)
    weight = meta(channels)
    assert found("cudnn_batch_norm", None, x, weight, None, None, None, True).requests == ()
    last = x.to(memory_format=torch.channels_last)
    taken = found("cudnn_batch_norm", None, last, weight, None, None, None, True)
    assert taken.confidence is BOUNDED
    assert told <= sum(taken.requests) <= max(5 * told, MIB)


def test_the_loss_of_sequences_of_cudnn_has_a_bound() -> None:
    """More than warp-ctc's, whose interface it has: a table, probabilities and sums."""
    steps, batch, labels, longest = 50, 4, 20, 10
    arguments = (meta(steps, batch, labels), meta(40), [50] * 4, [longest, 3, 2, 1], 0, True, False)
    taken = found("_cudnn_ctc_loss", None, *arguments)
    assert taken.confidence is BOUNDED
    assert sum(taken.requests) > 4 * batch * steps * (2 * longest + 1 + labels + 1)


def test_rows_that_are_made_shorter_are_looked_for() -> None:
    """Embedding.cu, embedding_renorm_cuda_: sorted values and indices, then distinct values."""
    rows = found("embedding_renorm_", meta(9, 4), meta(9, 4), meta(500, dtype=torch.int64), 1, 2)
    assert rows.requests == (*[4000] * 4, -4000, -4000, 4000, 8, 1023)
    many = found("embedding_renorm_", meta(9, 4), meta(9, 4), meta(5000, dtype=torch.int64), 1, 2)
    assert many.requests[4:6] == (99_327, -99_327)


def test_a_long_slice_is_sorted_in_a_copy_to_find_its_mode() -> None:
    """The sort is what torch 2.13.0's CUDA code asks an A100 for, without a GPU."""
    n, outputs = 1_000_000, (meta(2), meta(2))
    long = found("mode", outputs, meta(2, n))
    each = (8 * n, 12_342_527, -12_342_527, -8 * n)
    assert long == Workspace((2 * n * 4, *each, *each), BOUNDED)
    truths = found("mode", outputs, meta(2, 20_000, dtype=torch.bool))
    each = (34_823, -34_823, 69_391, -69_391)
    assert truths == Workspace((40_000, *each, *each))
    across = found("mode", (meta(4), meta(4)), meta(5000, 4), 0)
    assert across.requests[0] == 4 * 5000 * 4
    assert found("mode", (meta(4), meta(4)), meta(4, 2000)).requests in ((), (0,))


@pytest.mark.parametrize(("dtype", "norms"), [(FLOAT, 4 * 8), (HALF, 4 * 8 + 2 * 8)])
@pytest.mark.parametrize("in_place", [False, True])
def test_renorm_keeps_norms_and_factors(dtype: torch.dtype, norms: int, in_place: bool) -> None:
    """Normalization.cpp, TORCH_IMPL_FUNC(renorm_out)."""

    def step() -> Tensor:
        input = torch.ones(8, 16, dtype=dtype, device="cuda")
        return input.renorm_(2, 0, 1.0) if in_place else input.renorm(2, 0, 1.0)

    profile = trace(step, device="cuda")
    assert profile.peak == (1 if in_place else 2) * 8 * 16 * dtype.itemsize + norms
    assert not profile.unknown_workspaces


# -- positions: Nonzero.cu -------------------------------------------------------------------------


def test_blocks_of_nonzero_static_count_first() -> None:
    """One block for 8,192 elements, and at most one for each multiprocessor, two for bytes."""

    def counted(input: Tensor, size: int = 7) -> tuple[int, ...]:
        return found("nonzero_static", meta(input.dim(), size).t(), input, size=size).requests

    assert counted(meta(40, 50)) == (4, 8)
    assert counted(meta(100, 8192)) == (4 * 100, 8 * 100)
    assert counted(meta(300, 8192)) == (4 * 100, 8 * 100)  # three rounds on 108
    assert counted(meta(300, 8192, dtype=torch.bool)) == (4 * 150, 8 * 150)  # two on 216
    assert counted(meta(50, 40).t()) == (4 * 2000, 4, 8)
    assert counted(meta(40, 50), size=0) == ()
