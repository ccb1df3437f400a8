"""Programs whose operators sort, count, pick and scatter, for which CUDA's kernels take much."""

from __future__ import annotations

from collections.abc import Callable

import torch

LONG = torch.int64
_aten = torch.ops.aten


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros on the GPU, which values that no kernel computed are too."""
    return torch.zeros(*shape, dtype=dtype, device="cuda")


def deterministic(body: Callable[[], object]) -> Callable[[], object]:
    """Return ``body`` by deterministic algorithms."""

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
    indices, bag = zeros(5000, dtype=LONG), zeros(7, dtype=LONG)
    _aten._embedding_bag_dense_backward(
        zeros(7, 8), indices, indices, bag, bag, 100, False, 0, None, -1
    )


PROGRAMS: dict[str, Callable[[], object]] = {
    "embeddings": lambda: embeddings(100, torch.float32, LONG, False),
    "embeddings by frequency": lambda: embeddings(9000, torch.bfloat16, torch.int32, True),
    "bags": bags,
    "rows of embeddings": lambda: _aten.embedding_renorm_(
        zeros(10, 4), zeros(5000, dtype=LONG), 1.0, 2.0
    ),
    "sort": lambda: zeros(3, 5000).sort(),
    "sort of many": lambda: zeros(200, 5000, dtype=torch.bfloat16).sort(),
    "sort of a column": lambda: zeros(20_000, 3, dtype=torch.bool).sort(dim=0),
    "unique": lambda: torch.unique(zeros(20_000), return_inverse=True, return_counts=True),
    "unique halves": lambda: torch.unique(zeros(100_000, dtype=torch.bfloat16)),
    "unique neighbours": lambda: torch.unique_consecutive(
        zeros(100_000, dtype=torch.int16), return_inverse=True
    ),
    "topk": lambda: zeros(50, 20_000).topk(3),
    "topk of many": lambda: zeros(50, 20_000).topk(5000),
    "median": lambda: zeros(20_000).median(),
    "mode": lambda: zeros(20_000, dtype=torch.bool).mode(),
    "nonzero": lambda: zeros(200_000).nonzero(),
    "mask": lambda: zeros(20_000)[zeros(20_000, dtype=torch.bool)],
    "masked select": lambda: zeros(500, 3).masked_select(zeros(1, 3, dtype=torch.bool)),
    "masked scatter": lambda: zeros(500, 3).masked_scatter(
        zeros(3, dtype=torch.bool), zeros(500, 3)
    ),
    "indices": lambda: zeros(5, 300, 2)[zeros(5, 1, dtype=LONG), zeros(1, 300, dtype=LONG)],
    "sums by index": lambda: zeros(100, 4, 3).index_put_(
        (zeros(5000, dtype=LONG), zeros(5000, dtype=LONG)), zeros(5000, 3), accumulate=True
    ),
    "segments": lambda: torch.segment_reduce(
        zeros(10, 3), "sum", lengths=zeros(4, dtype=LONG), unsafe=True
    ),
    "counts": lambda: torch.bincount(zeros(1000, dtype=LONG), zeros(1000, dtype=LONG)),
    "histogram": lambda: torch.histc(zeros(1000, 2).t()),
    "samples": lambda: torch.ones(3, 5000, device="cuda").multinomial(5),
    "permutation": lambda: torch.randperm(50_000, device="cuda"),
    "sums": lambda: zeros(100_000, dtype=torch.bfloat16).cumsum(0),
    "deterministic sums": deterministic(lambda: zeros(5_000_000).cumsum(0)),
    "deterministic scattering": deterministic(
        lambda: zeros(100, 8).scatter_reduce(0, zeros(50, 8, dtype=LONG), zeros(50, 8), "mean")
    ),
    "deterministic sums by index": deterministic(
        lambda: zeros(100, 8).index_add_(1, zeros(5, dtype=LONG), zeros(100, 5))
    ),
}
