"""Programs of several processes, each traced as its own rank."""

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
from tests.processes import run_program

PROGRAM = """
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_torchmem import trace
from pytest_torchmem.errors import UnsupportedOperatorError

warnings.simplefilter("ignore")
SIZE = 1 << 20
hook = sys.excepthook


def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def fake():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def collectives():
    tensor = torch.randn(SIZE)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.barrier()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)


def old_sharded():
    FullyShardedDataParallel(nn.Linear(4, 4))


def gathered_count():
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.ones(1, dtype=torch.long))
    torch.zeros(counts[0].tolist())


def error_of(*args, **kwargs):
    try:
        trace(*args, **kwargs)
    except Exception as error:
        return error


def refused(name, *args, **kwargs):
    error = error_of(*args, **kwargs)
    assert isinstance(error, UnsupportedOperatorError), repr(error)
    assert name in str(error), error


for device in ("cpu", "cuda"):
    for start, world in ((gloo, 1), (fake, 4)):

        def after_start(program):
            def run():
                start()
                with torch.device(device):
                    program()

            return run

        peak = trace(after_start(collectives), device=device).peak
        flat = world if device == "cuda" else 0  # NCCL gathers into one tensor first
        assert peak == (1 + world + flat) * 4 * SIZE, (peak, device, world)
        assert not dist.is_initialized() and sys.excepthook is hook
        for name, program in (
            ("fully_shard", old_sharded),
        ):
            refused(name, after_start(program), device=device)
            assert not dist.is_initialized()
        # What the others have is not known: they are taken to have the same.
        warnings_of_it = trace(after_start(gathered_count), device=device, values="none").warnings
        assert len(warnings_of_it) == (world > 1), warnings_of_it

gloo()  # the caller's own group stays, and what was wrapped in it works as before
wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
shards = fully_shard(nn.Linear(4, 4))
refused("Sequential.0", nn.Sequential(wrapped), torch.randn(2, 4))
refused("FSDPModule", shards, torch.randn(2, 4))
for device in ("cpu", "cuda"):
    refused("FSDPModule", lambda: shards(torch.randn(2, 4, device=device)), device=device)
wrapped(torch.randn(2, 4)).sum().backward()
shards(torch.randn(2, 4)).sum().backward()
trace(collectives)
assert dist.is_initialized()
dist.destroy_process_group()
"""


def test_programs_that_use_torch_distributed() -> None:
    """Collectives keep tensors hollow, wrappers say what to do, groups do not outlive a trace."""
    run_program(PROGRAM)


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
