"""Stages of pipelines, each traced as its own rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from pytest_torchmem import trace

WIDTH, STAGES, PARTS, ROWS = 64, 4, 8, 32


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def run(schedule: type, device: str = "cpu", given: bool = True) -> None:
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    layers = (one for _ in range(6) for one in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid()))
    module = nn.Sequential(*layers).to(device)
    sent = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    shapes = {"input_args": (sent if rank else sent.detach(),), "output_args": (sent,)}
    stage = PipelineStage(module, rank, STAGES, torch.device(device), **(shapes if given else {}))
    steps = schedule(stage, n_microbatches=PARTS, loss_fn=squared)
    batch = torch.randn(PARTS * ROWS, WIDTH, device=device)
    if rank == 0:
        steps.step(batch)
    elif rank == STAGES - 1:
        steps.step(target=batch, losses=[])
    else:
        steps.step()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_peaks_differ_by_stage_and_schedule(device: str) -> None:
    peaks = {
        kind: [
            trace(run, kind, device, device=device, world_size=STAGES, rank=rank).peak
            for rank in (0, 1, STAGES - 1)
        ]
        for kind in (Schedule1F1B, ScheduleGPipe)
    }
    first, _, last = peaks[Schedule1F1B]
    assert last < first  # a stage keeps a batch for each of those behind it
    assert first < peaks[ScheduleGPipe][0]  # which keeps all batches


def test_shapes_that_others_send_are_asked_of_them() -> None:
    for rank in (0, 2):
        given, asked = (
            trace(run, Schedule1F1B, "cpu", given, world_size=STAGES, rank=rank).peak
            for given in (True, False)
        )
        assert asked - given < 1024  # the bytes of the objects


def interleaved() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(nn.Linear(WIDTH, WIDTH), index, 2 * size, torch.device("cpu"))
        for index in (rank, rank + size)
    ]
    steps = ScheduleInterleaved1F1B(stages, n_microbatches=PARTS, loss_fn=squared)
    batch = torch.randn(PARTS * ROWS, WIDTH)
    if rank == 0:
        steps.step(batch)
    else:
        steps.step(target=batch, losses=[])


def test_two_ranks_can_wait_for_each_other() -> None:
    for rank in (0, 1):  # a later stage of the first needs an earlier one of the second
        assert trace(interleaved, world_size=2, rank=rank).peak
