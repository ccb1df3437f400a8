"""Collectives of a group of one process have values: what it hands out is what it gets back."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from pytest_torchmem import trace


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("values", ["auto", "none", "real"])
def test_a_process_alone_gets_its_own(device: str, values: str) -> None:
    def program() -> None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        x = torch.arange(4, device=device)

        def empty() -> torch.Tensor:
            return torch.empty(4, dtype=torch.int64, device=device)

        gathered, reduced, exchanged, listed = empty(), empty(), empty(), [empty()]
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(reduced, x)
        dist.all_to_all_single(exchanged, x)
        dist.all_gather(listed, x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        for one in (gathered, reduced, exchanged, listed[0], x):
            assert one.sum() == 6
        if values != "none":
            assert functional.all_reduce(x, "sum", dist.group.WORLD).sum() == 6
        dist.barrier()

    trace(program, device=device, values=values)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_objects(device: str) -> None:
    def program() -> None:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, {"loss": 1.5})
        assert gathered == [{"loss": 1.5}]
        sent = ["a", {"b": 2}]
        dist.broadcast_object_list(sent, 0)
        assert sent == ["a", {"b": 2}]
        at_root: list[object] = [None]
        dist.gather_object({"x": 1}, at_root)
        assert at_root == [{"x": 1}]
        scattered: list[object] = [None]
        dist.scatter_object_list(scattered, [{"y": 2}])
        assert scattered == [{"y": 2}]

    trace(program, device=device)


def test_a_functional_collective_requests_its_output_once() -> None:
    def program() -> None:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        x = torch.ones(1 << 16)
        found = functional.all_reduce(x, "sum", dist.group.WORLD)
        assert found.shape == x.shape

    assert trace(program).peak == 2 * 4 * (1 << 16)


def test_a_tensor_that_is_resized_keeps_its_values() -> None:
    def program() -> None:
        for size in (8, 1 << 20):
            bytes_ = torch.arange(8, dtype=torch.uint8).resize_(size)
            assert bytes_[5] == 5

    trace(program, device="cpu")
