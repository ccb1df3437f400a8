"""A program's own fake tensors, and those on ``meta``, on fake cuda."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_torchmem import trace


@torch.library.custom_op("torchmem_fake::squared", mutates_args=())
def squared(x: Tensor) -> Tensor:
    """Return what ``opcheck`` compares with its description."""
    return x * x


squared.register_fake(lambda x: torch.empty_like(x))
GPU = torch.device("cuda:0")


def test_an_operator_is_checked_against_its_description() -> None:
    def program() -> None:
        tests = ("test_schema", "test_faketensor")
        found = torch.library.opcheck(squared, (torch.ones(3, device="cuda"),), test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}

    trace(program, device="cuda")


def test_they_say_the_device_that_they_stand_for() -> None:
    def program() -> None:
        x = torch.randn(2, 3, device="cuda")
        with FakeTensorMode() as mode, torch.device("cuda"):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # which makes a constant
            fake = mode.from_tensor(x)
            output = model(fake)
            output.sum().backward()
            assert "cuda:0" in repr(output)  # after which the program still is in the mode
            assert (output + 1).device == fake.device == model[0].weight.grad.device == GPU
            assert torch.ones(3, device="cpu").device.type == "cpu"
            with pytest.raises(RuntimeError, match=r"found .*devices"):
                torch.ones(2, 4, device="cpu") + output
            count = torch.tensor(3, device="cuda")
            assert count.item() == 3

    before = torch.ones(1)
    assert trace(program, device="cuda").peak < 2048
    assert before.device.type == "cpu"


def test_they_are_on_the_gpu_that_is_the_current_one() -> None:
    """Torch remembers what such calls give, and did not know that the GPU was another."""
    found = []

    def program() -> None:
        for index in (0, 1):
            with torch.cuda.device(index), FakeTensorMode():
                found.append(torch.empty_strided((257,), (1,), device="cuda").device.index)

    trace(program, device="cuda", gpus=2)
    assert found == [0, 1]


def test_a_graph_of_them_runs_where_they_were() -> None:
    def program() -> None:
        x = torch.randn(2, 3, device="cuda")
        graph = make_fx(
            lambda y: y + torch.zeros(3, device="cuda") + torch.ones(3).to("cuda"),
            tracing_mode="fake",
        )(x)
        assert graph(x).device == GPU

    trace(program, device="cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_copied_out_of_meta(device: str) -> None:
    def program() -> None:
        empty = torch.empty(3, device="meta")
        for target in (device, "cpu"):
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
                empty.to(target)
        with pytest.raises(NotImplementedError, match=r"Please use torch.nn.Module.to_empty\(\)"):
            nn.Linear(2, 2, device="meta").to(device)
        assert empty.to(device="meta", dtype=torch.half).dtype is torch.half

    trace(program, device=device)
