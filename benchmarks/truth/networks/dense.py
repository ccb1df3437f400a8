"""Perceptrons, autoencoders and tables of embeddings."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.truth.networks.registry import network


def rows(batch: int, width: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, width]."""
    return (torch.randn(batch, width),)


_TINY = {"batch": 4, "width": 32, "count": 2}


@network("dense/gelu-layer-norm", rows, {"batch": 4096, "width": 4096, "count": 6}, _TINY)
def normalised(width: int, count: int, **_: Any) -> nn.Module:
    """Return linear layers with GELU and layer norm."""
    layers = ((nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(count))
    return nn.Sequential(*(layer for group in layers for layer in group))


@network("dense/relu-dropout", rows, {"batch": 16384, "width": 2048, "count": 6}, _TINY)
def dropped(width: int, count: int, **_: Any) -> nn.Module:
    """Return linear layers with ReLU in place and dropout."""
    layers = (
        (nn.Linear(width, width), nn.ReLU(inplace=True), nn.Dropout(0.1)) for _ in range(count)
    )
    return nn.Sequential(*(layer for group in layers for layer in group))


@network("dense/batch-norm", rows, {"batch": 16384, "width": 2048, "count": 6}, _TINY)
def batch_normalised(width: int, count: int, **_: Any) -> nn.Module:
    """Return linear layers with batch norm and SELU."""
    layers = ((nn.Linear(width, width), nn.BatchNorm1d(width), nn.SELU()) for _ in range(count))
    return nn.Sequential(*(layer for group in layers for layer in group))


@network("dense/autoencoder", rows, {"batch": 8192, "width": 4096, "count": 4}, _TINY)
def autoencoder(width: int, count: int, **_: Any) -> nn.Module:
    """Return layers that get narrower and wide again."""
    widths = [width // 2**index for index in range(count)]
    steps = [*pairwise(widths)]
    steps += [(narrow, wide) for wide, narrow in reversed(steps)]
    return nn.Sequential(*(layer for pair in steps for layer in (nn.Linear(*pair), nn.Tanh())))


class Recommender(nn.Module):
    """Tables of embeddings, their products, and a perceptron."""

    def __init__(self, tables: int, size: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * tables, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return a score per row of int64[batch, tables]."""
        found = [table(ids[:, index]) for index, table in enumerate(self.tables)]
        rows = torch.stack(found, 1)
        return self.top(torch.bmm(rows, rows.transpose(1, 2)).flatten(1))


def ids(batch: int, tables: int, size: int, **_: Any) -> tuple[Tensor, ...]:
    """Return int64[batch, tables]."""
    return (torch.randint(0, size, (batch, tables)),)


_TABLES = {"batch": 32768, "tables": 16, "size": 50_000, "width": 64}


@network("dense/recommender", ids, _TABLES, {"batch": 4, "tables": 3, "size": 10, "width": 8})
def recommender(tables: int, size: int, width: int, **_: Any) -> nn.Module:
    """Return a recommender."""
    return Recommender(tables, size, width)
