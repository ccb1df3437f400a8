"""The families: every module that registers what is known of operators, imported at first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module

_MODULES = {
    "": (
        "activations answers elementwise factories foreach fourier histograms random "
        "softmax without_workspace"
    ),
    "attention": "choice dot_product efficient encoder_layer flash flash_for_cpu multi_head values",
    "convolution": "alone convolution",
    "distributed": "lists",
    "embedding": "bag rows",
    "indexing": "advanced masks rearrange rows scatter",
    "linear_algebra": "distance lapack lu",
    "losses": "ctc elementwise likelihood",
    "matmul": "low_precision products",
    "nested": "conversion",
    "normalization": "batch_norm cudnn_batch_norm group_norm layer_norm weight_norm",
    "recurrent": "cells cudnn layers onednn packed_sequence values",
    "reduction": "extremes sums",
    "resampling": "grid_sampler interpolation padding patches pooling",
    "sorting": "distinct order scans",
    "sparse": "compressed coo",
}
"""By the folder of a family."""


@cache
def load() -> None:
    """Import every family."""
    for folder, modules in _MODULES.items():
        for module in modules.split():
            import_module(".".join(filter(None, ("pytest_torchmem.operators", folder, module))))
