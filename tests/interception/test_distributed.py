"""Programs that use torch.distributed, in one process of their own: groups belong to a process."""

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
