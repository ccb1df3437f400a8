"""Programs for whose operators CUDA's kernels take more than the outputs, and what they take.

``cuda_requests.json`` has what torch's own CUDA code asks for, without a GPU. For another torch:

    torchmem stand-in --gpu t4 -- python -m tests.operators.cuda_programs t4    # and each other GPU
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import linalg, nn
from torch.nn.utils.rnn import pack_padded_sequence

from pytest_torchmem import MemoryProfile, measure

FLOAT, DOUBLE, HALF, BFLOAT = torch.float32, torch.float64, torch.float16, torch.bfloat16
LONG, SHORT, BOOL, COMPLEX = torch.int64, torch.int16, torch.bool, torch.complex64
SCORES, MILLION = (4, 8, 512, 512), 1_000_000
RECORDED = Path(__file__).with_name("cuda_requests.json")
EVERY, OF_X, NOT_OF_X = (True, True, True), (True, False, False), (False, True, True)
_aten = torch.ops.aten


def zeros(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Return zeros on the GPU, which values that no kernel computed are too."""
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def drawn(*shape: int) -> torch.Tensor:
    """Return a matrix that can be inverted."""
    return torch.randn(shape, device="cuda")


def empty(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


longs, truths = partial(zeros, dtype=LONG), partial(empty, dtype=BOOL)
halves, bfloats = partial(empty, dtype=HALF), partial(empty, dtype=BFLOAT)


def backward(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    """Run a function of what is given, and its backward."""
    function(*(one.requires_grad_() for one in given)).sum().backward()


def last(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Return a tensor on the GPU whose channels are the densest."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return torch.empty(shape, dtype=dtype, device="cuda", memory_format=formats[len(shape)])


def flash(batch, heads, rows, size, groups=1, by_head=False):
    query = bfloats(batch, heads, rows, size)
    key = bfloats(batch, heads // groups, rows, size)
    out, *kept = _aten._scaled_dot_product_flash_attention(query, key, key)
    gradient = torch.empty_like(query if by_head else out)
    *sums, seed, offset, _ = kept
    given = gradient, query, key, key, out, *sums, 0.0, False, seed, offset
    _aten._scaled_dot_product_flash_attention_backward(*given)


def efficient(dtype, batch, heads, rows, size, keys=0):
    query, key = empty(batch, heads, rows, size, dtype=dtype), None
    key = empty(batch, heads, keys or rows, size, dtype=dtype)
    out, *kept = _aten._scaled_dot_product_efficient_attention(query, key, key, None, True)
    given = query, key, key, None, out, *kept, 0.0, [True, True, True, False]
    for gradient in (torch.empty_like(out), torch.empty_like(query)):
        _aten._scaled_dot_product_efficient_attention_backward(gradient, *given)


def layer_norm(rows: int, columns: int) -> None:
    x, weight, row = empty(rows, columns), empty(columns), empty(rows, 1)
    _aten.native_layer_norm_backward(x, x, [columns], row, row, weight, weight, EVERY)


def group_norm(*shape: int, wanted: tuple[bool, ...] = EVERY) -> None:
    x, weight = empty(*shape), empty(shape[1])
    sizes = (shape[0], shape[1], x.numel() // shape[0] // shape[1], 8)
    _, mean, scale = _aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    _aten.native_group_norm_backward(x, x, mean, scale, weight, *sizes, wanted)


def softmax_backward(gradient: torch.Tensor) -> torch.Tensor:
    return _aten._softmax_backward_data(gradient, empty(*SCORES), -1, FLOAT)


def batch_norm(x, gradient, train, wanted=EVERY):
    kept = (empty(8),) * 5
    _aten.native_batch_norm_backward(gradient, x, *kept, train, 0.0, wanted)


@torch.no_grad()
def attended(size: int, heads: int) -> None:
    x = empty(2, 5, size)
    layer = nn.MultiheadAttention(size, heads, batch_first=True, device="cuda")
    layer.eval()(x, x, x, need_weights=False)


def interpolated(channels: int) -> None:
    x, grad = last(2, channels, 8, 8), last(2, channels, 16, 16)
    sizes = [16, 16], [2, channels, 8, 8]
    _aten.upsample_nearest2d(x, [16, 16])
    _aten.upsample_nearest2d_backward(grad, *sizes)
    for name in ("bilinear2d", "bicubic2d"):
        getattr(_aten, f"upsample_{name}")(x, [16, 16], False)
        getattr(_aten, f"upsample_{name}_backward")(grad, *sizes, False)
    _aten._upsample_bilinear2d_aa(x, [16, 16], False)
    _aten._upsample_bilinear2d_aa_backward(grad, *sizes, False)


def volumes() -> None:
    x, grad, sizes = last(2, 8, 4, 4, 4), last(2, 8, 8, 8, 8), ([8, 8, 8], [2, 8, 4, 4, 4])
    _aten.upsample_nearest3d(x, [8, 8, 8])
    _aten.upsample_nearest3d_backward(grad, *sizes)
    _aten.upsample_trilinear3d(x, [8, 8, 8], False)
    _aten.upsample_trilinear3d_backward(grad, *sizes, False)


def pooled() -> None:
    x = last(2, 8, 16, 16)
    out, places = _aten.adaptive_max_pool2d(x, [4, 4])
    _aten.adaptive_max_pool2d_backward(torch.empty_like(out), x, places)
    _aten._adaptive_avg_pool2d_backward(empty(2, 8, 4, 4), x)
    volume = last(2, 8, 4, 4, 4)
    out, places = _aten.max_pool3d_with_indices(volume, [2])
    for grad in (out, out.contiguous()):
        _aten.max_pool3d_with_indices_backward(grad, volume, [2], [2], [0], [1], False, places)


def distances() -> None:
    first, second, grad = empty(500, 3), empty(4, 600, 3), empty(4, 500, 600)
    _aten._cdist_forward(first.expand(4, 500, 3), second, 1.0, None)
    _aten._cdist_backward(grad, first.expand(4, 500, 3), second, 1.0, grad)
    points, pairs = empty(100, 3), empty(4950)
    _aten._pdist_forward(points, 2.0)
    _aten._pdist_backward(pairs, points, 2.0, pairs)


def scattered(into: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
    into.scatter(0, index, source)
    into.scatter(0, index, 1.0)
    into.scatter_add(0, index, source)
    for reduction in ("mean", "amax"):
        into.scatter_reduce(0, index, source, reduction)


def clipped() -> None:
    parameters = [nn.Parameter(empty(256, 1024)), nn.Parameter(empty(8))]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    nn.utils.clip_grad_norm_(parameters, 1.0)


@torch.no_grad()
def encoded(dtype: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device="cuda", dtype=dtype)
    layer.eval()(empty(2, 8, 32, dtype=dtype))


def lists_of_autocast() -> None:
    x, half, double = empty(4, 4), halves(4, 4), empty(4, 4, dtype=DOUBLE)
    classes = longs(4)
    with torch.autocast("cuda"):
        for run in (
            *(lambda: x @ x, lambda: F.linear(x, x), lambda: double @ double),
            *(lambda: torch.einsum("ab,bc->ac", x, x), lambda: torch.cat([half, half])),
            *(lambda: half.softmax(-1), half.exp, lambda: F.layer_norm(half, (4,))),
            *(half.sum, lambda: half.sum(dtype=DOUBLE), lambda: half.norm(2), lambda: half**2),
            *(lambda: F.cross_entropy(half, classes), classes.sum, half.relu),
            *(lambda: torch.addcmul(half, x, half), lambda: torch.addcmul(half, half, half)),
            lambda: half + half,
        ):
            run()


def both_directions() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        for layer in (nn.GRU(16, 32, bidirectional=True), nn.RNN(16, 32, 2, bidirectional=True)):
            backward(lambda x, layer=layer: layer(x)[0], layer.cuda() and empty(5, 4, 16))


def without_cudnn() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        F.conv2d(empty(2, 4, 10, 10), empty(8, 4, 3, 3))


def classified(x: torch.Tensor) -> torch.Tensor:
    gradient, targets, weights = empty(), longs(8), empty(16)
    total = _aten.nll_loss_forward(x, longs(8), empty(16), 1, -100)[1]
    return _aten.nll_loss_backward(gradient, x, targets, weights, 1, -100, total)


def ctc() -> None:
    scores, table = empty(50, 4, 20), empty(4, 50, 21)
    targets = empty(4, 10, dtype=LONG)
    _aten._ctc_loss_backward(empty(4), scores, targets, [50] * 4, [10] * 4, empty(4), table, 0)


def deterministic(body: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            body()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def embeddings(weights: int, dtype: torch.dtype, index: torch.dtype, by_frequency: bool) -> None:
    gradient, indices = zeros(5000, 8, dtype=dtype), zeros(5000, dtype=index)
    _aten.embedding_dense_backward(gradient, indices, weights, -1, by_frequency)


def bags() -> None:
    indices, bag = longs(5000), longs(7)
    places = indices, indices, bag, bag
    _aten._embedding_bag_dense_backward(zeros(7, 8), *places, 100, False, 0, None, -1)


def summed(into: torch.Tensor, places: list[Any], given: torch.Tensor) -> torch.Tensor:
    return into.index_put_(places, given, accumulate=True)


TENS, TWOS = torch.tensor([10, 10]), torch.tensor([2, 2])
ON_HOST, SUMMED = torch.tensor([[1, 2], [3, 4]]), (FLOAT, BFLOAT, COMPLEX)
PROGRAMS: dict[str, Callable[[], object]] = {
    "embeddings": lambda: embeddings(100, FLOAT, LONG, False),
    "embeddings by frequency": lambda: embeddings(9000, BFLOAT, torch.int32, True),
    "bags": bags,
    "rows of embeddings": lambda: _aten.embedding_renorm_(zeros(10, 4), longs(5000), 1.0, 2.0),
    "sort": lambda: zeros(3, 5000).sort(),
    "sort of many": lambda: zeros(200, 5000, dtype=BFLOAT).sort(),
    "sort of a column": lambda: zeros(20_000, 3, dtype=BOOL).sort(dim=0),
    "unique": lambda: torch.unique(zeros(20_000), return_inverse=True, return_counts=True),
    "unique halves": lambda: torch.unique(zeros(100_000, dtype=BFLOAT)),
    "unique neighbours": lambda: torch.unique_consecutive(
        zeros(100_000, dtype=SHORT), return_inverse=True
    ),
    "topk": lambda: zeros(50, 20_000).topk(3),
    "topk of many": lambda: zeros(50, 20_000).topk(5000),
    "median": lambda: zeros(20_000).median(),
    "mode": lambda: zeros(20_000, dtype=BOOL).mode(),
    "nonzero": lambda: zeros(200_000).nonzero(),
    "mask": lambda: zeros(20_000)[zeros(20_000, dtype=BOOL)],
    "masked select": lambda: zeros(500, 3).masked_select(zeros(1, 3, dtype=BOOL)),
    "masked scatter": lambda: zeros(500, 3).masked_scatter(zeros(3, dtype=BOOL), zeros(500, 3)),
    "indices": lambda: zeros(5, 300, 2)[longs(5, 1), longs(1, 300)],
    "sums by index": lambda: summed(zeros(100, 4, 3), [longs(5000), longs(5000)], zeros(5000, 3)),
    "segments": lambda: torch.segment_reduce(zeros(10, 3), "sum", lengths=longs(4), unsafe=True),
    "counts": lambda: torch.bincount(longs(1000), longs(1000)),
    "histogram": lambda: torch.histc(zeros(1000, 2).t()),
    "samples": lambda: torch.ones(3, 5000, device="cuda").multinomial(5),
    "permutation": lambda: torch.randperm(50_000, device="cuda"),
    "sums": lambda: zeros(100_000, dtype=BFLOAT).cumsum(0),
    "deterministic sums": deterministic(lambda: zeros(5_000_000).cumsum(0)),
    "deterministic scattering": deterministic(
        lambda: zeros(100, 8).scatter_reduce(0, longs(50, 8), zeros(50, 8), "mean")
    ),
    "deterministic sums by index": deterministic(
        lambda: zeros(100, 8).index_add_(1, longs(5), zeros(100, 5))
    ),
    # What CUB takes for many elements, by its policies.
    "a million sorted": lambda: [zeros(MILLION, dtype=of).sort() for of in (FLOAT, BFLOAT, BOOL)],
    "a million distinct": lambda: (
        [torch.unique(zeros(MILLION, dtype=of)) for of in (FLOAT, SHORT)],
        torch.unique(zeros(MILLION, dtype=torch.int8), return_counts=True),
        torch.unique(longs(MILLION), return_inverse=True),
    ),
    "a million summed up": lambda: [zeros(MILLION, dtype=of).cumsum(0) for of in SUMMED],
    "a million that are not zero": lambda: zeros(MILLION).nonzero(),
    "a million embeddings": lambda: _aten.embedding_dense_backward(
        zeros(MILLION, 1), longs(MILLION), 10, -1, True
    ),
    # Reductions: Reduce.cuh.
    "columns added up": lambda: empty(8192, 4096).sum(0),
    "few columns added up": lambda: empty(8192, 768).sum(0),
    "short columns added up": lambda: empty(1024, 768).sum(0),
    "short columns of bfloat16 added up": lambda: bfloats(1024, 768).sum(0),
    "shorter columns added up": lambda: empty(512, 768).sum(0),
    "many columns added up": lambda: empty(32768, 16384).sum(0),
    "rows added up": lambda: empty(8192, 4096).sum(1),
    "images added up": lambda: empty(64, 3, 224, 224).sum(),
    "little added up": lambda: (empty(4, 5).sum(), empty(0, 5).sum(0), empty().sum()),
    "channels added up": lambda: empty(32, 64, 112, 112).sum((0, 2, 3)),
    "channels added up where they are the densest": lambda: last(32, 64, 112, 112).sum((0, 2, 3)),
    "columns beyond 32 bits": lambda: empty(2**16, 2**14).sum(0),
    "columns of bfloat16 beyond 32 bits": lambda: bfloats(2**17, 2**14).sum(0),
    "maxima": lambda: [of(empty(8192, 512), 0) for of in (torch.amax, torch.max, torch.argmax)],
    "variances": lambda: empty(8192, 512).var(0),
    "norms": lambda: linalg.vector_norm(empty(8192, 512), 2, 0),
    "truths added up": lambda: truths(100, 10).sum(),
    "halves added up in float32": lambda: halves(100, 10).sum(dtype=FLOAT),
    "numbers added up in float64": lambda: empty(100, 10).sum(dtype=DOUBLE),
    "norms of several": lambda: [
        of([empty(200_000), empty(10)], 2) for of in (torch._foreach_norm, torch._foreach_powsum)
    ],
    # Attention: flash_api.cpp, kernel_backward.h.
    "flash attention": lambda: flash(8, 12, 1024, 64),
    "flash attention of padded heads": lambda: flash(1, 2, 100, 40),
    "flash attention of large heads": lambda: flash(1, 2, 128, 200),
    "flash attention of grouped heads": lambda: flash(1, 32, 8192, 128, 4),
    "flash attention with a gradient by head": lambda: flash(2, 4, 128, 64, by_head=True),
    "flash attention of few blocks": lambda: flash(1, 8, 512, 64),
    "flash attention of one query": lambda: _aten._scaled_dot_product_flash_attention(
        bfloats(1, 32, 1, 128), *[bfloats(1, 8, 4096, 128)] * 2
    ),
    "efficient attention": lambda: efficient(HALF, 8, 12, 1024, 64),
    "efficient attention in float32": lambda: efficient(FLOAT, 8, 12, 1000, 64),
    "efficient attention of large heads": lambda: efficient(HALF, 1, 4, 256, 256, 1024),
    "efficient attention of heads of 128": lambda: efficient(HALF, 2, 8, 512, 128),
    "efficient attention of heads of 256": lambda: efficient(HALF, 8, 32, 1024, 256),
    # Normalisation, softmax, losses.
    "layer norm of short rows": lambda: layer_norm(100_000, 64),
    "layer norm of fewer rows": lambda: (layer_norm(65_536, 64), layer_norm(100_000, 4096)),
    "rms norm of short rows": lambda: _aten._fused_rms_norm_backward(
        empty(100_000, 64), empty(100_000, 64), [64], empty(100_000, 1), empty(64), [True, True]
    ),
    "group norm": lambda: group_norm(4, 32, 8, 8),
    "group norm of vectors": lambda: group_norm(4, 32),
    "group norm of vectors without their gradient": lambda: group_norm(4, 32, wanted=NOT_OF_X),
    "batch norm": lambda: batch_norm(empty(2, 8, 4, 4), empty(2, 8, 4, 4), True),
    "batch norm where channels are the densest": lambda: [
        batch_norm(last(2, 8, 4, 4), of(2, 8, 4, 4), of is last, wanted)
        for of, wanted in ((last, EVERY), (empty, EVERY), (empty, OF_X))
    ],
    "batch norm with gradients that lie otherwise": lambda: (
        batch_norm(empty(2, 8, 4, 4), empty(2, 8, 4, 6)[..., :4], True),
        batch_norm(empty(2, 8, 4, 4), empty(2, 8, 1, 1).expand(2, 8, 4, 4), True),
    ),
    "softmax": lambda: _aten._softmax_backward_data(*[empty(*SCORES)] * 2, -1, FLOAT),
    "softmax with gradients that lie otherwise": lambda: (
        softmax_backward(empty(*SCORES).transpose(2, 3)),
        softmax_backward(empty(1).expand(SCORES)),
        _aten._log_softmax_backward_data(*[empty(*SCORES)] * 2, -1, FLOAT),
    ),
    "losses": lambda: (
        F.mse_loss(empty(100, 10), empty(100, 10)),
        F.mse_loss(empty(100, 10), empty(100, 10), reduction="none"),
        F.binary_cross_entropy(empty(100, 10), empty(100, 10)),
    ),
    "losses of margins": lambda: (
        F.multi_margin_loss(empty(6, 4), longs(6)),
        F.multi_margin_loss(empty(4, 6).t(), longs(6)),
        F.multi_margin_loss(empty(6, 4), longs(6), reduction="none"),
        _aten.multilabel_margin_loss_forward(empty(4, 6).t(), longs(6, 4), 1),
    ),
    "losses of classes": lambda: [classified(x) for x in (empty(8, 16), empty(16, 8).t())],
    "a loss of sequences": ctc,
    "cells of gates": lambda: [
        _aten._thnn_fused_gru_cell_backward(empty(8192, 256), empty(8192, 5 * 256), bias)
        for bias in (True, False)
    ],
    # Copies, by what lies how.
    "histogram of a range": lambda: (torch.histc(empty(64), 8, 0, 7), torch.histc(empty(64), 8)),
    "windows": lambda: [
        getattr(torch, f"{name}_window")(size, device="cuda")
        for name in ("hann", "bartlett", "kaiser", "blackman")
        for size in (64, 1)
    ],
    "products of what cuBLAS cannot read": lambda: [
        x @ empty(16, 4)
        for x in (empty(8, 16), empty(16, 8).t(), empty(8, 32)[:, ::2], empty(1, 1).expand(8, 16))
    ],
    "products of conjugates": lambda: [
        x @ x.mT
        for x in (empty(8, 16, dtype=COMPLEX).conj(), empty(4, 8, 16, dtype=COMPLEX).conj())
    ],
    "packed sequences": lambda: [
        pack_padded_sequence(x, torch.tensor([6, 4, 3, 3]), first)
        for x, first in ((empty(4, 6, 64), True), (empty(6, 4, 64), False))
    ],
    "choices": lambda: (
        torch.where(truths(64), bfloats(64), empty(64)),
        torch.where(truths(64), empty(64), empty(64)),
        torch.where(empty(64, dtype=torch.uint8), empty(64), empty(64)),
    ),
    "scattering": lambda: scattered(empty(10, 4), longs(50, 4), empty(50, 4)),
    "deterministic scattering of much": deterministic(
        lambda: scattered(empty(100, 8), longs(5000, 8), empty(5000, 8))
    ),
    "deterministic scattering of a vector": deterministic(
        lambda: scattered(empty(100), longs(5000), empty(5000))
    ),
    "copies by index": lambda: empty(100, 8).index_copy(0, longs(5), empty(5, 8)),
    "deterministic copies by index": deterministic(
        lambda: empty(100, 8).index_copy(0, longs(5), empty(5, 8))
    ),
    "reductions by index": lambda: [
        empty(10, 4).index_reduce(0, longs(50), empty(50, 4), reduction)
        for reduction in ("mean", "amax")
    ],
    "sums by index of an expanded row": lambda: summed(zeros(100, 16), [longs(4096)], zeros(16)),
    "sums by indices apart": lambda: _aten.index_put_(
        zeros(8, 16, 8), [longs(100), None, longs(100)], zeros(100, 16), True
    ),
    "sums by indices beside each other": lambda: summed(
        zeros(8, 16, 8), [longs(100), longs(100)], zeros(100, 8)
    ),
    "numbers of the host written by index": lambda: [
        empty(8, 16).__setitem__(place, 2)
        for place in (0, (slice(None), slice(3)), zeros(8, 16) > 0, zeros(8) > 0, [1, 2])
    ],
    "equal": lambda: (torch.equal(zeros(10, 10), zeros(10, 10)), torch.equal(zeros(10), zeros(9))),
    "selections": lambda: [
        (x.kthvalue(2, 1), x.median(1), x.nanmedian(1)) for x in (empty(8, 16), empty(16, 8).t())
    ],
    "topk that is not sorted": lambda: empty(50, 20_000).topk(5000, sorted=False),
    "sort of short rows": lambda: empty(8, 4096).sort(),
    "boundaries": lambda: (
        torch.bucketize(empty(100), empty(8, dtype=DOUBLE)),
        torch.searchsorted(empty(8), empty(100)),
        torch.searchsorted(empty(8, dtype=DOUBLE)[::2], 0.5),
        torch.bucketize(0.5, empty(8)),
    ),
    "norms of rows": lambda: (empty(8, 16).renorm(2, 0, 1.0), halves(8, 16).renorm_(2, 0, 1.0)),
    "places": lambda: [
        torch.nonzero_static(x, size=size)
        for x, size in (
            *((empty(*shape), 7) for shape in ((40, 50), (100, 8192), (300, 8192))),
            *((truths(300, 8192), 7), (empty(50, 40).t(), 7), (empty(40, 50), 0)),
        )
    ],
    "distances": distances,
    "few channels interpolated": lambda: interpolated(3),
    "channels interpolated": lambda: (interpolated(4), interpolated(16)),
    "volumes interpolated": volumes,
    "columns folded": lambda: (
        F.fold(empty(2, 144, 1024), (32, 32), 3, padding=1),
        backward(lambda x: F.unfold(x, 3, padding=1), empty(2, 16, 32, 32)),
    ),
    "pooling": pooled,
    "pooling undone": lambda: F.max_unpool3d(
        empty(2, 8, 4, 4, 4).transpose(2, 3), longs(2, 8, 4, 4, 4), 2
    ),
    "windows of images": lambda: [
        empty(2, 8, 8, 16).roll(shifts, dims)
        for shifts, dims in (([1], [1]), ([-3, -3], [1, 2]), ([1, 1, 1], [0, 1, 2]))
    ],
    # What C++ decides by the device, and the order of outputs.
    "maximum": lambda: backward(torch.max, empty(1000, 1000)),
    "rows made shorter": lambda: backward(lambda x: x.renorm(2, 0, 1.0), empty(1000, 1000)),
    "absolute values of complex numbers": lambda: backward(
        lambda x: torch.view_as_complex(x.view(1000, 500, 2)).abs(), empty(1000, 1000)
    ),
    "padded volumes": lambda: backward(nn.ReflectionPad3d(1), empty(2, 4, 4, 4)),
    "fractional volumes": lambda: backward(nn.FractionalMaxPool3d(2, 3), empty(2, 4, 7, 7, 7)),
    "inverse transform": lambda: torch.fft.irfft(empty(4, 10, 20, dtype=COMPLEX), dim=1),
    "rows of a list": lambda: backward(lambda x: x[[1, 2, 3]], empty(100, 100)),
    "chunks": lambda: torch._chunk_cat([empty(5, 3), empty(4, 3)], 0, 2),
    "product with itself": lambda: backward(lambda x: x @ x.mT, empty(64, 64)),
    "product with a vector": lambda: torch.mv(empty(16, 32)[:, ::2], empty(16), out=empty(16)),
    "linear layer": lambda: backward(
        lambda *given: F.linear(*given).square(), empty(8192, 256), empty(768, 256), empty(768)
    ),
    "clipped gradients": clipped,
    "distances by products": lambda: _aten._euclidean_dist(empty(640, 32), empty(480, 32)),
    "convolution without cuDNN": without_cudnn,
    "repetitions": lambda: (empty(100, 100).repeat(2, 3), empty(10, 10).tile(2, 1, 3)),
    "group norm in bfloat16": lambda: F.group_norm(bfloats(4, 6, 5), 3, bfloats(6), bfloats(6)),
    "draws in bfloat16": lambda: torch.bernoulli(zeros(2, 3, 4, dtype=BFLOAT)),
    "powers of a number": lambda: 2.0 ** empty(100),
    "norms of complex numbers": lambda: (empty(5, 1, dtype=COMPLEX).norm(2, 1), empty().norm(2, 0)),
    "frozen batch norm": lambda: backward(nn.BatchNorm1d(64, device="cuda").eval(), empty(4, 64)),
    "dropout": lambda: F.dropout(empty(4096), 0.5),
    "lists of autocast": lists_of_autocast,
    "recurrent layers without cuDNN": both_directions,
    "cells and their gradients": lambda: (
        backward(nn.GRUCell(8, 64, device="cuda"), empty(2, 8)),
        backward(lambda x: nn.LSTMCell(8, 64, device="cuda")(x)[0], empty(2, 8)),
    ),
    "log sigmoid": lambda: F.logsigmoid(empty(1024)),
    "softmax of halves in float32": lambda: [
        backward(lambda x, of=of: of(x, -1, dtype=FLOAT), empty(4, 8, dtype=dtype))
        for of in (F.softmax, F.log_softmax)
        for dtype in (HALF, BFLOAT)
    ],
    "rms norm": lambda: (
        backward(nn.RMSNorm(64, device="cuda"), empty(2, 8, 64)),
        F.rms_norm(halves(2, 64), (64,), empty(64)),
    ),
    "group norm where channels are the densest": lambda: backward(
        lambda x, scale: F.group_norm(x, 2, scale), last(2, 8, 4, 8), empty(8)
    ),
    "shuffled pixels": lambda: [
        backward(lambda x, of=of: of(x, 2), last(2, 8, 4, 4))
        for of in (F.pixel_shuffle, F.pixel_unshuffle)
    ],
    "encoders in evaluation": lambda: [encoded(dtype) for dtype in (HALF, FLOAT, DOUBLE)],
    "a loss of sequences with targets on the host": lambda: backward(
        lambda x: F.ctc_loss(x.log_softmax(-1), ON_HOST, TENS, TWOS), empty(10, 2, 5)
    ),
    "a loss of sequences by batch": lambda: backward(
        lambda x: F.ctc_loss(x.log_softmax(-1).transpose(0, 1), longs(2, 3), TENS, TWOS),
        empty(2, 10, 5),
    ),
    "a loss whose mean comes last": lambda: backward(
        lambda x: F.huber_loss(x, zeros(500, 3)), empty(500, 3)
    ),
    "attention with a mask of padding": lambda: F.scaled_dot_product_attention(
        empty(2, 2, 5, 16), *[empty(2, 2, 7, 16)] * 2, attn_mask=zeros(5, 7, dtype=BOOL)
    ),
    "attention in evaluation of heads of 12": lambda: attended(48, 4),
    "bags of words": lambda: torch._embedding_bag(empty(50, 24), longs(40), longs(3)),
    # Linear algebra, without what cuSOLVER asks for itself.
    "triangle": lambda: backward(
        lambda a, b: linalg.solve_triangular(a, b, upper=True), drawn(64, 64), drawn(64, 8)
    ),
    "factors": lambda: backward(lambda a: linalg.lu_factor(a)[0], drawn(4, 64, 64)),
    "factors of a tall matrix": lambda: backward(lambda a: linalg.lu(a)[2], drawn(64, 32)),
    "solutions": lambda: backward(linalg.solve, drawn(16, 64, 64), drawn(16, 64, 8)),
    "inverse": lambda: backward(linalg.inv, drawn(64, 64)),
    "solutions by Cholesky factors": lambda: backward(
        torch.cholesky_solve, drawn(4, 64, 8), drawn(4, 64, 64)
    ),
    "inverse by Cholesky factors": lambda: backward(torch.cholesky_inverse, drawn(64, 64)),
    "windows that overlap": lambda: (
        _aten.unfold_backward(empty(499, 4), [1000], 0, 4, 2),
        _aten.unfold_backward(empty(500, 2), [1000], 0, 2, 2),
    ),
}


def requests(profile: MemoryProfile) -> list[int]:
    """Return what was requested and, with negative bytes, released: several in any order."""
    allocations, found = profile.timeline.allocations, list[int]()
    sizes = [(event > 0, allocations[abs(event) - 1].nbytes) for event in profile.timeline.events]
    for is_request, group in groupby((one for one in sizes if one[1]), lambda one: one[0]):
        of_group = [nbytes for _, nbytes in group]
        found += of_group if is_request else [-one for one in sorted(of_group, reverse=True)]
    return found


def read_requests() -> dict[str, dict[str, list[int]]]:
    """Return what was recorded, by GPU and program."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    del recorded["torch"]
    return {
        gpu: {name: [*map(int, text.split())] for name, text in found.items()}
        for gpu, found in recorded.items()
    }


def main(gpu: str) -> None:
    """Record what each new program requests on the GPU that is there; leave out what cannot run."""
    recorded: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found: dict[str, str] = recorded.get(gpu, {})
    for name, program in PROGRAMS.items():
        if name in found:
            continue
        try:
            found[name] = " ".join(map(str, requests(measure(program, device="cuda"))))
        except RuntimeError as error:
            print(f"{gpu}, {name}: {error}")
    recorded |= {"torch": torch.__version__, gpu: found}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
