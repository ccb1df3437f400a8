"""A program that sees several GPUs: each has its ledger and its allocator."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.profile import MemoryProfile

SECOND = torch.device("cuda", 1)
KIB = 1024


def on_two(program: Any, **options: Any) -> MemoryProfile:
    return trace(program, device="cuda", gpus=2, **options)


def test_each_gpu_has_figures_of_its_own() -> None:
    def program() -> None:
        first = torch.ones(256, device="cuda")
        second = [torch.ones(512, device="cuda:1"), first.to(1), first.cuda(SECOND)]
        assert {tensor.device for tensor in second} == {SECOND}
        assert torch.cuda.memory_allocated() == 1 * KIB
        assert torch.cuda.memory_allocated(1) == 4 * KIB
        assert torch.cuda.memory_reserved("cuda:1") == 2 * KIB * KIB
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1"):
            first + second[1]
        with pytest.raises(RuntimeError, match="invalid device ordinal: cuda:2"):
            torch.ones(1, device=2)
        assert {found["device"] for found in torch.cuda.memory_snapshot()} == {0, 1}

    profile = on_two(program)
    assert profile.peak == 1 * KIB
    assert list(profile.devices) == ["cuda:0", "cuda:1"]
    assert profile.devices["cuda:0"] is profile
    other = profile.devices["cuda:1"]
    assert (other.device, other.peak, other.reserved_peak) == ("cuda:1", 4 * KIB, 2 * KIB * KIB)


def test_the_current_gpu_is_where_cuda_is() -> None:
    def program() -> None:
        cuda, accelerator = torch.cuda, torch.accelerator
        assert cuda.device_count() == accelerator.device_count() == 2
        with cuda.device(1):
            assert cuda.current_device() == accelerator.current_device_index() == 1
            assert torch.ones(1, device="cuda").device == torch.ones(1).cuda().device == SECOND
            with cuda.device(-1), cuda.device(None):
                assert cuda.current_device() == 1
            with accelerator.device_index(0):
                assert cuda.current_device() == 0
            assert cuda.current_stream().device == SECOND
        assert cuda.current_device() == 0
        cuda.set_device(SECOND)
        assert torch.Generator("cuda").device == SECOND
        cuda.set_device(0)
        assert cuda.can_device_access_peer(0, 1)
        assert len(cuda.get_rng_state_all()) == len(cuda.default_generators) == 2

    on_two(program)
    trace(lambda: torch.cuda.current_device(), device="cuda")


def test_streams_belong_to_a_gpu() -> None:
    def program() -> None:
        side = torch.cuda.Stream(device=1)
        with torch.cuda.stream(side):
            assert torch.cuda.current_device() == 1
            tensor = torch.ones(256, device="cuda")
            torch.ones(256, device="cuda:0")
        assert torch.cuda.current_device() == torch.cuda.current_stream(1).stream_id == 0
        tensor.record_stream(torch.cuda.current_stream(1))
        del tensor
        again = torch.ones(256, device=1)
        assert torch.cuda.memory_reserved(1) == 2 * 2 * KIB * KIB  # each stream has its blocks
        del again

    on_two(program)


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 128).to(0)
        self.second = nn.Linear(128, 64).to("cuda:1")

    def forward(self, input: Tensor) -> Tensor:
        return self.second(self.first(input).to(1))


def test_a_pipeline_has_each_stage_on_its_gpu() -> None:
    def program() -> None:
        model = Pipeline()
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(32, 256, device=0)).sum().backward()
        optimizer.step()
        assert model.second.weight.grad.device == SECOND
        assert optimizer.state[model.second.weight]["exp_avg"].device == SECOND

    profile = on_two(program)
    second = profile.devices["cuda:1"]
    assert second.end == profile.end  # the workspaces of cuBLAS
    assert second.by_kind("backward")["parameter"] == 4 * (128 * 64 + 64)
    assert profile.by_kind("backward")["parameter"] == 4 * (256 * 128 + 128)
    assert second.optimizer_peak >= 4 * 4 * (128 * 64 + 64)


def test_data_parallel_has_a_replica_on_each() -> None:
    def program() -> None:
        model = nn.DataParallel(nn.Linear(512, 512).cuda())
        assert model.device_ids == [0, 1]
        output = model(torch.ones(64, 512))
        assert (output.shape, output.device.index) == ((64, 512), 0)
        output.sum().backward()
        assert model.module.weight.grad.device.index == 0

    profile = on_two(program)
    parameters = 4 * (512 * 512 + 512)
    assert profile.devices["cuda:1"].forward_peak >= parameters + 4 * 2 * 32 * 512
    assert profile.backward_peak > 3 * parameters  # its own gradients, the replica's, the sum


def test_a_file_says_which_gpu(tmp_path: Path) -> None:
    def program() -> None:
        torch.save([torch.ones(2, device=1)], tmp_path / "a.pt")
        assert torch.load(tmp_path / "a.pt")[0].device == SECOND
        assert torch.load(tmp_path / "a.pt", map_location="cuda:0")[0].device.index == 0

    on_two(program)
    with pytest.raises(RuntimeError, match=r"CUDA device 1 but torch.cuda.device_count\(\) is 1"):
        trace(lambda: torch.load(tmp_path / "a.pt"), device="cuda")


def test_each_gpu_has_all_of_its_memory() -> None:
    def program() -> None:
        kept = [torch.empty(10 << 30, dtype=torch.uint8, device=index) for index in (0, 1)]
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total"):
            kept.append(torch.empty(10 << 30, dtype=torch.uint8, device=1))

    on_two(program, gpu="t4")


def test_one_gpu_is_as_it_was() -> None:
    def program() -> None:
        nn.Linear(8, 8, device="cuda")(torch.ones(4, 8, device="cuda")).sum().backward()

    profile = trace(program, device="cuda")
    assert profile.figures() == on_two(program).figures()
    assert profile.devices == {"cuda:0": profile}
    assert trace(lambda: torch.ones(1)).devices.keys() == {"cpu"}


@pytest.mark.parametrize("gpus", [0, -1, 65, "2", True, 1.5])
def test_a_number_of_gpus_that_none_is(gpus: Any) -> None:
    with pytest.raises(UsageError, match="expected how many GPUs the program sees"):
        trace(lambda: None, device="cuda", gpus=gpus)
