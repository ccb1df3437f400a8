"""``DTensor`` on fake cuda takes the GPU's paths; checkpoints of shards are written and read."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from benchmarks.sharded_steps.programs import PROGRAMS, Decoder, shard, start, train
from pytest_torchmem import MemoryProfile, trace


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

    def program(together: bool) -> None:
        mesh: Any = start("cpu")
        first, second = (
            [
                distribute_tensor(torch.ones(shape, dtype=torch.int32), mesh, placement)
                for shape, placement in zip(shapes, given, strict=True)
            ]
            for given in (placements, placements[1:] + placements[:1])
        )
        if together:
            summed = torch._foreach_add(first, second)
            torch._foreach_add_(first, second)
            scaled = torch._foreach_mul(first, scalars)
        else:
            summed = tuple(map(torch.add, first, second))
            first = [one.add_(two) for one, two in zip(first, second, strict=True)]
            scaled = tuple(map(torch.mul, first, scalars))
        found.append([(one.placements, one.shape, one.dtype) for one in (*summed, *first, *scaled)])

    found: list[Any] = []
    for together in (True, False):
        trace(program, together, world_size=2)
    assert found[0] == found[1]
    assert found[0][-1][2] == torch.int32
    assert found[0][-2][2] == torch.float32


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
        with context_parallel(
            mesh, buffers=[tokens], buffer_seq_dims=[1], no_restore_buffers={tokens}
        ):
            logits = model(tokens)
            assert logits.shape[1] == 64
            logits.float().sum().backward()

    profile = trace(program, device="cuda", world_size=2, rank=rank)
    assert any("flash_attention" in name for name in operators(profile))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_of_shards(tmp_path: Path, device: str, rank: int) -> None:
    def program() -> None:
        model = shard(Decoder(1).to(device), mesh=start(device))
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, 1, device)
        both = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(both, checkpoint_id=tmp_path / device)
        dcp.load(both, checkpoint_id=tmp_path / device)
        if device == "cpu":  # it talks by gloo
            dcp.async_save(both, checkpoint_id=tmp_path / f"{device}-later").result()
        set_state_dict(
            model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
        )
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        assert bool(get_model_state_dict(model, options=whole)) == (dist.get_rank() == 0)
        full = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=full)
        assert state["head.weight"].shape == (256, 64)
        set_model_state_dict(model, state, options=full)
        told = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state = get_model_state_dict(model, options=full)
        set_model_state_dict(model, {} if dist.get_rank() else state, options=told)

    trace(program, device=device, world_size=2, rank=rank)
    assert not dist.is_initialized()
