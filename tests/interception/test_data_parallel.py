"""``DistributedDataParallel`` in a trace: its own reducer in C++ runs, and makes its buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.sharded_steps.programs import PROGRAMS, Decoder, start, train
from pytest_torchmem import measure, trace

PEAKS = ("forward_peak", "backward_peak", "optimizer_peak")


def hooked(device: str = "cpu") -> None:
    """Gradients that are sent in half precision."""
    start(device)
    model = DistributedDataParallel(Decoder().to(device))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), momentum=0.9), device=device)


def redundancy_free(device: str = "cpu") -> None:
    """Optimizer states that the processes share out among them."""
    start(device)
    model = DistributedDataParallel(Decoder().to(device))
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    train(model, optimizer, device=device)


@pytest.mark.parametrize("name", ["ddp", "ddp_views", "ddp_accumulated"])
def test_peaks_are_those_of_a_real_process(name: str) -> None:
    traced = trace(PROGRAMS[name], host="here", world_size=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = measure(PROGRAMS[name])
    finally:
        dist.destroy_process_group()
    assert [getattr(traced, peak) for peak in PEAKS] == [getattr(real, peak) for peak in PEAKS]
    assert not traced.warnings


@pytest.mark.parametrize("views", [False, True])
def test_buckets_take_the_gradients_once_more_unless_these_are_views(views: bool) -> None:
    def program() -> None:
        start("cuda")
        model = DistributedDataParallel(Decoder().cuda(), gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters())
        train(model, optimizer, device="cuda")

    profile = trace(program, device="cuda", world_size=4)
    gradients = sum(one.numel() * one.element_size() for one in Decoder().parameters())
    kinds = profile.by_kind("optimizer")
    assert kinds["communication buffer"] == gradients
    assert kinds.get("gradient", 0) == (0 if views else gradients)
    assert kinds["parameter"] == gradients


def test_hooks_and_optimizers_on_top() -> None:
    plain, half = (trace(one, world_size=8) for one in (PROGRAMS["ddp"], hooked))
    assert half.peak > 0
    shared = trace(redundancy_free, world_size=8)
    assert shared.optimizer_peak is not None
    assert plain.optimizer_peak is not None
    states = 2 * sum(one.numel() * one.element_size() for one in Decoder().parameters())
    assert plain.optimizer_peak - shared.optimizer_peak > states / 2


def test_a_wrapped_module_from_outside_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)))
        with pytest.raises(Exception, match=r"Sequential\.0 \(DistributedDataParallel\)"):
            trace(model, torch.randn(2, 4))
    finally:
        dist.destroy_process_group()
