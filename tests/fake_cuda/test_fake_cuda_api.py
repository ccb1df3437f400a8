"""``torch.cuda`` and ``torch.accelerator`` answer for the GPU, with the trace's own figures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.targets.gpus import find_gpu
from tests.results import on_fake_cuda


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
