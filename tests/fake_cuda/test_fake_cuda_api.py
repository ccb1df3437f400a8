"""``torch.cuda`` and ``torch.accelerator`` answer for the GPU, with the trace's own figures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_fake_cuda import on_fake_cuda
from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.targets.gpus import find_gpu


def test_the_device_that_is_there() -> None:
    def body() -> list[Any]:
        properties = torch.cuda.get_device_properties(0)
        return [
            torch.cuda.is_available(),
            torch.cuda.is_initialized(),
            torch.cuda.device_count(),
            torch.cuda.current_device(),
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability("cuda:0"),
            torch.cuda.is_bf16_supported(),
            properties.name,
            properties.total_memory,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            torch.accelerator.is_available(),
            torch.accelerator.current_accelerator(),
            torch.accelerator.device_count(),
            torch.backends.cudnn.is_available(),
            torch.get_device_module("cuda") is torch.cuda,
        ]

    assert on_fake_cuda(body, gpu="h100") == [
        True,
        True,
        1,
        0,
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        True,
        "NVIDIA H100 80GB HBM3",
        find_gpu("h100").memory,
        (9, 0),
        132,
        True,
        torch.device("cuda"),
        1,
        True,
        True,
    ]
    assert not on_fake_cuda(
        lambda: torch.cuda.is_bf16_supported(including_emulation=False), gpu="t4"
    )


def test_allocated_bytes_are_blocks_of_512() -> None:
    def body() -> list[int]:
        a = torch.ones(1000, device="cuda")  # 4000 bytes: a block of 4096
        first = torch.cuda.memory_allocated()
        b = torch.ones(1, device="cuda")
        del b
        figures = [first, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        torch.cuda.reset_peak_memory_stats()
        figures.append(torch.cuda.max_memory_allocated())
        stats = torch.cuda.memory_stats()
        figures += [stats["requested_bytes.all.current"], stats["allocated_bytes.all.peak"]]
        figures += [torch.accelerator.memory_allocated(), stats["allocation.all.allocated"]]
        return figures if a is not None else []

    assert on_fake_cuda(body) == [4096, 4096, 4608, 4096, 4000, 4096, 4096, 2]


def test_a_test_written_for_a_gpu_passes_or_fails_here() -> None:
    def body() -> None:
        torch.cuda.reset_peak_memory_stats()
        weight = nn.Parameter(torch.ones(1 << 20, device="cuda"))
        weight.exp().sum().backward()
        # The weight, what exp saved, the gradient; the loss and its gradient are blocks of 512.
        assert torch.cuda.max_memory_allocated() == 3 * (4 << 20) + 2 * 512

    on_fake_cuda(body)


def test_reserved_and_free_memory() -> None:
    gpu = find_gpu("t4")

    def body() -> list[Any]:
        empty = torch.cuda.mem_get_info()
        x = torch.ones(5 * 1024**2, dtype=torch.uint8, device="cuda")
        reserved = torch.cuda.memory_reserved()
        del x
        kept = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return [
            empty == (gpu.memory - gpu.context, gpu.memory),
            reserved == 20 * 1024**2,
            kept == reserved,
            torch.cuda.memory_reserved() == 0,
            torch.cuda.max_memory_reserved() == reserved,
            torch.accelerator.max_memory_reserved() == reserved,
            (free, total) == empty == torch.accelerator.get_memory_info(),
            "Allocated memory" in torch.cuda.memory_summary(),
        ]

    assert on_fake_cuda(body, gpu="t4") == [True] * 8


def test_streams_and_events_order_nothing() -> None:
    def body() -> list[Any]:
        stream = torch.cuda.Stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = torch.ones(3, device="cuda") * 2
            x.record_stream(stream)
        with torch.cuda.device(0):
            torch.cuda.synchronize()
        end.record(stream)
        end.synchronize()
        torch.cuda.nvtx.range_push("name")
        torch.cuda.nvtx.range_pop()
        return [x.is_cuda, start.elapsed_time(end), isinstance(stream, torch.cuda.Stream)]

    assert on_fake_cuda(body) == [True, 0.0005, True]


def test_what_the_driver_and_the_libraries_are_asked() -> None:
    def body() -> list[Any]:
        x = torch.ones(300_000, device="cuda")
        torch.cuda.reset_peak_host_memory_stats()
        free, total = torch.cuda.mem_get_info()
        return [
            torch.cuda.device_memory_used() == total - free > x.nbytes,
            torch.cuda.host_memory_stats_as_nested_dict() == {},
            torch.cuda.temperature() == torch.cuda.memory_usage() == 0,
            torch.cuda.get_sync_debug_mode() == 0,
            torch.backends.cuda.cublas_workspace_size() == 32 * 1024**2,
            torch.backends.cuda.cublaslt_workspace_size() == 32 * 1024**2,
        ]

    assert on_fake_cuda(body, gpu="h100") == [True] * 6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: torch.cuda.caching_allocator_alloc(512), "raw GPU pointers"),
        (lambda: torch.backends.cuda.cublas_workspace_size(0), "CUBLAS_WORKSPACE_CONFIG"),
    ],
    ids=["pointer", "size"],
)
def test_what_a_trace_cannot_do_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        on_fake_cuda(call)


def test_generator_functions() -> None:
    def body() -> None:
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        state = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        with torch.random.fork_rng(devices=[0]):
            torch.rand(2, device="cuda")

    on_fake_cuda(body)


def test_checkpointing_keeps_the_generator_of_the_gpu() -> None:
    def body() -> bool:
        layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
        x = torch.ones(2, 8, device="cuda", requires_grad=True)
        for reentrant in (False, True):
            output = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            output.sum().backward()
        return x.grad is not None and x.grad.is_cuda

    assert on_fake_cuda(body)


@pytest.mark.parametrize("name", ["t4", "v100", "a100-40gb", "rtx-5090", "b200"])
def test_every_gpu_can_be_stood_for(name: str) -> None:
    assert on_fake_cuda(lambda: torch.ones(1, device="cuda").is_cuda, gpu=name)
