"""The families: every module that registers what is known of operators, imported at first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

_MODULES = (
    "activations",
    "answers",
    "attention.choice",
    "attention.cudnn",
    "attention.dot_product",
    "attention.efficient",
    "attention.encoder_layer",
    "attention.flash",
    "attention.flash_for_cpu",
    "attention.multi_head",
    "convolution.convolution",
    "convolution.cudnn",
    "convolution.slow",
    "copies",
    "elementwise",
    "embedding.bag",
    "embedding.rows",
    "factories",
    "foreach",
    "fourier",
    "histograms",
    "indexing.advanced",
    "indexing.masks",
    "indexing.rearrange",
    "indexing.rows",
    "indexing.scatter",
    "linear_algebra.distance",
    "linear_algebra.lu",
    "linear_algebra.qr",
    "linear_algebra.solve",
    "linear_algebra.spectral",
    "losses.ctc",
    "losses.elementwise",
    "losses.likelihood",
    "matmul.low_precision",
    "matmul.products",
    "nested.conversion",
    "normalization.batch_norm",
    "normalization.cudnn_batch_norm",
    "normalization.group_norm",
    "normalization.layer_norm",
    "normalization.renorm",
    "normalization.synchronized_batch_norm",
    "normalization.weight_norm",
    "random",
    "recurrent.cells",
    "recurrent.cudnn",
    "recurrent.cudnn_weights",
    "recurrent.layers",
    "recurrent.onednn",
    "recurrent.packed_sequence",
    "reduction.extremes",
    "reduction.sums",
    "resampling.grid_sampler",
    "resampling.interpolation",
    "resampling.padding",
    "resampling.patches",
    "resampling.pooling",
    "resampling.shuffle",
    "softmax",
    "sorting.distinct",
    "sorting.order",
    "sorting.scans",
    "sparse.compressed",
    "sparse.conversion",
    "sparse.coo",
    "without_workspace",
)


@cache
def load() -> None:
    """Import every family."""
    for module in _MODULES:
        import_module(f"pytest_torchmem.operators.{module}")
