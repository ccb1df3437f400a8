"""Programs of several processes, each traced as its own rank; ``DTensor`` and its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from benchmarks.sharded_steps.programs import PROGRAMS, Decoder, shard, start, train
from pytest_torchmem import MemoryProfile, trace
from tests.processes import run_program
from tests.results import result_of

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
        refused("fully_shard", after_start(old_sharded), device=device)
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


def test_peaks_differ_by_stage_and_schedule(device: str) -> None:
    def peaks(kind: type) -> list[int]:
        options = {"device": device, "world_size": STAGES}
        return [trace(run, kind, device, **options, rank=rank).peak for rank in (0, 1, STAGES - 1)]

    first, _, last = peaks(Schedule1F1B)
    assert last < first  # a stage keeps a batch for each of those behind it
    assert first < peaks(ScheduleGPipe)[0]  # which keeps all batches


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
    own, cpu = (rank, rank + size), torch.device("cpu")
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), each, 2 * size, cpu) for each in own]
    kind = pipelining.ScheduleInterleaved1F1B
    steps = kind(stages, n_microbatches=PARTS, loss_fn=squared)
    batch = torch.randn(PARTS * ROWS, WIDTH)
    if rank == 0:
        steps.step(batch)
    else:
        steps.step(target=batch, losses=[])


def test_two_ranks_can_wait_for_each_other() -> None:
    for rank in (0, 1):  # a later stage of the first needs an earlier one of the second
        assert trace(interleaved, world_size=2, rank=rank).peak


def operators(profile: MemoryProfile) -> set[str]:
    """Return what allocated in a trace."""
    return {one.origin.operator for one in profile.timeline.allocations}


def attended(*tensors: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*tensors, is_causal=True)


def test_composite_operators_take_the_paths_of_plain_tensors() -> None:
    def program(size: int, heads: int, distributed: bool) -> None:
        mesh: Any = start("cuda")
        shape = (2, heads, 64, 32)
        parts = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        weight = torch.ones(32, device="cuda", dtype=torch.bfloat16)
        if distributed:
            parts = [distribute_tensor(one, mesh, [Shard(1)]) for one in parts]
            weight = distribute_tensor(weight, mesh, [Replicate()])
        for one in (*parts, weight):
            one.requires_grad_()
        functional.rms_norm(attended(*parts), (32,), weight).sum().backward()

    def found(*arguments: Any) -> set[str]:
        made = operators(trace(program, *arguments, device="cuda", world_size=2))
        return {name for name in made if "attention" in name or "norm" in name}

    assert found(2, 8, True) == found(2, 4, False)
    assert any("flash_attention" in name for name in found(2, 8, True))


def test_what_is_split_anew_is_there_until_it_is_in_order() -> None:
    def program() -> None:
        mesh: Any = start("cuda")
        whole = DTensor.from_local(torch.ones(4, 64, 256, device="cuda"), mesh, [Shard(1)])
        whole.redistribute(mesh, [Shard(2)])

    # The shard, a copy by destinations, what is received, and the same in order.
    assert trace(program, device="cuda", world_size=4).peak == 4 * (4 * 64 * 256 * 4)


def test_lists_of_alike_tensors_are_split_as_one_by_one() -> None:
    placements = [[Shard(0)], [Replicate()], [Shard(1)], [Shard(0)], [Replicate()], [Shard(0)]]
    shapes = [(8, 4), (8, 4), (8, 4), (8, 4), (8, 4), (6, 2)]
    scalars = [1, 1.0, 2, 1, 1.0, 1]

    def program(together: bool) -> list[Any]:
        mesh: Any = start("cpu")
        ones = [torch.ones(shape, dtype=torch.int32) for shape in shapes]
        others = placements[1:] + placements[:1]
        first = list(map(distribute_tensor, ones, [mesh] * 6, placements))
        second = list(map(distribute_tensor, map(torch.clone, ones), [mesh] * 6, others))
        if together:
            summed = torch._foreach_add(first, second)
            torch._foreach_add_(first, second)
            scaled = torch._foreach_mul(first, scalars)
        else:
            summed = tuple(map(torch.add, first, second))
            first = [one.add_(two) for one, two in zip(first, second, strict=True)]
            scaled = tuple(map(torch.mul, first, scalars))
        return [(one.placements, one.shape, one.dtype) for one in (*summed, *first, *scaled)]

    found = result_of(lambda: program(True), world_size=2)
    assert found == result_of(lambda: program(False), world_size=2)
    assert [one[2] for one in found[-2:]] == [torch.float32, torch.int32]


def test_shards_are_initialised_where_they_are() -> None:
    def program() -> None:
        mesh: Any = start("cuda")
        with torch.device("meta"):
            model = nn.Linear(64, 64)
        shard = distribute_tensor(torch.empty(64, 64, device="cuda"), mesh, [Shard(0)])
        model.weight = nn.Parameter(shard)
        before = torch.cuda.memory_allocated()
        nn.init.kaiming_uniform_(model.weight)
        assert torch.cuda.memory_allocated() == before
        functional.dropout(model.weight).sum().backward()

    made = trace(program, device="cuda", world_size=4)
    trace(PROGRAMS["fsdp_meta"], world_size=2)  # on the host nothing is left of the GPU's
    dropped = [x for x in made.timeline.allocations if "dropout" in x.origin.operator]
    assert [one.nbytes for one in dropped[:2]] == [16 * 64, 16 * 64 * 4]  # of the shard


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallel_splits_the_sequence(rank: int) -> None:
    def program() -> None:
        mesh: Any = start("cuda")
        model = Decoder(1).to("cuda", torch.bfloat16)
        tokens = torch.randint(256, (2, 128), device="cuda")
        split = {"buffers": [tokens], "buffer_seq_dims": [1], "no_restore_buffers": {tokens}}
        with context_parallel(mesh, **split):
            logits = model(tokens)
            assert logits.shape[1] == 64
            logits.float().sum().backward()

    profile = trace(program, device="cuda", world_size=2, rank=rank)
    assert any("flash_attention" in name for name in operators(profile))


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_of_shards(tmp_path: Path, device: str, rank: int) -> None:
    def program() -> None:
        model = shard(Decoder(1).to(device), mesh=start(device))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 1, device)
        of_model, of_optimizer = state_dict.get_state_dict(model, optimizer)
        both = {"model": of_model, "optimizer": of_optimizer}
        dcp.save(both, checkpoint_id=tmp_path / device)
        dcp.load(both, checkpoint_id=tmp_path / device)
        if device == "cpu":  # it talks by gloo
            dcp.async_save(both, checkpoint_id=tmp_path / f"{device}-later").result()
        read = {"model_state_dict": both["model"], "optim_state_dict": both["optimizer"]}
        state_dict.set_state_dict(model, optimizer, **read)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert bool(state_dict.get_model_state_dict(model, options=whole)) == (dist.get_rank() == 0)
        full = StateDictOptions(full_state_dict=True)
        state = state_dict.get_model_state_dict(model, options=full)
        assert state["head.weight"].shape == (256, 64)
        state_dict.set_model_state_dict(model, state, options=full)
        told = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = state_dict.get_model_state_dict(model, options=full)
        state_dict.set_model_state_dict(model, {} if dist.get_rank() else state, options=told)

    trace(program, device=device, world_size=2, rank=rank)
    assert not dist.is_initialized()
