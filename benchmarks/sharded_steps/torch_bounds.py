"""The bounds that torch's own test of FSDP2's memory asserts, and what a trace has.

    python -m benchmarks.sharded_steps.torch_bounds [--gpu a100]

The test is pytorch's test/distributed/_composable/fsdp/test_fully_shard_memory.py, on two GPUs. The
program here reads ``torch.cuda.memory_stats()`` in the trace where the test does. Each line is one
of the test's assertions: megabytes (of 1,000,000 bytes) beyond what was active before the model.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.testing._internal.distributed._tensor.common_dtensor import (
    ModelArgs,
    Transformer,
    TransformerBlock,
)

from pytest_torchmem import trace

VOCABULARY, WIDTH = 32, 768


class Sizes(NamedTuple):
    """Megabytes of parameters in float32."""

    sharded: float
    unsharded: float
    block: float
    """Of one block, unsharded."""
    others: float
    """Of what is in no block."""


def megabytes(parameters: Iterable[torch.Tensor]) -> float:
    """Return what parameters take."""
    return sum(parameter.numel() for parameter in parameters) * 4 / 1e6


def active(which: str) -> float:
    """Return active memory: "peak" or "current"."""
    return round(torch.cuda.memory_stats()[f"active_bytes.all.{which}"] / 1e6)


def sizes_of(model: Any) -> Sizes:
    """Return the sizes that the bounds are made of."""
    whole = megabytes(model.parameters())
    block = megabytes(model.layers[0].parameters())
    return Sizes(whole / 2, whole, block, whole - block * len(model.layers))


def bounds(sizes: Sizes, reshard: bool, offload: bool) -> dict[str, float]:
    """Return the bounds by what is asserted, in order."""
    on_gpu = 0 if offload else sizes.sharded
    made = 1.5 * sizes.block if offload else sizes.sharded + sizes.block
    if reshard:
        gathered = 3 * sizes.block + sizes.others + 16
        forward, backward = gathered + on_gpu, gathered + sizes.block + 2 * on_gpu
    else:
        both = sizes.sharded + sizes.unsharded + 16
        forward, backward = both + sizes.block, both + 1.5 * sizes.block
    return {
        "made, peak": made + 4,
        "made": made,
        "forward": forward,
        "backward": backward,
        "optimizer": 16 + 4 * on_gpu,
        "gradients freed": 0 if offload else 3 * on_gpu + 32,
    }


def program(found: list[tuple[str, float, float]], reshard: bool, offload: bool) -> None:
    """Run the test's step, and write down each figure with its bound."""
    dist.init_process_group("nccl")
    linear = nn.Linear(WIDTH, WIDTH, device="cuda")
    given = torch.randn(2, WIDTH, device="cuda")
    linear(given).sum().backward()  # workspaces of cuBLAS
    torch.cuda.empty_cache()
    base = active("peak")
    options: dict[str, Any] = {"n_layers": 3, "dim": WIDTH, "n_heads": 12, "weight_tying": False}
    model = Transformer(ModelArgs(vocab_size=VOCABULARY, **options))
    asserted = iter(bounds(sizes_of(model), reshard, offload).items())

    def compare(which: str = "peak") -> None:
        name, bound = next(asserted)
        found.append((name, active(which) - base, bound))

    policy: Any = CPUOffloadPolicy() if offload else OffloadPolicy()
    arguments = {"reshard_after_forward": reshard, "offload_policy": policy}
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module, **arguments)
    fully_shard(model, **arguments)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    compare()
    compare("current")
    loss = model(torch.randint(0, VOCABULARY, (1, 4), device="cuda"))
    compare()
    loss.sum().backward()
    compare()
    del loss
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    compare()
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    compare()


def main() -> None:
    """Trace, and print the figures beside the bounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", default="a100")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[list[object]] = []
    for reshard, offload in ((True, False), (True, True), (False, False)):
        found: list[tuple[str, float, float]] = []
        trace(program, found, reshard, offload, device="cuda", gpu=options.gpu, world_size=2)
        for name, figure, bound in found:
            beyond = figure - bound if figure > bound else ""
            rows.append(["yes" if reshard else "no", "yes" if offload else "no", name])
            rows[-1] += [figure, bound, beyond]
    headers = ["resharded", "offloaded", "", "trace", "bound", "beyond it"]
    print(tabulate(rows, headers, floatfmt=".1f"))
    print(f"\nMB beyond what was active before, {options.gpu}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
