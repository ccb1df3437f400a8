"""What ``torch.cuda``'s and ``torch.accelerator``'s memory functions answer in a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.allocator import CachingAllocator, parse_options
from pytest_torchmem.allocator.blocks import Block
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import DeviceMemory

#: torch's own function goes through its own ``memory_stats``, which answers here.
_SUMMARY: Callable[..., str] = torch.cuda.memory_summary


#: Functions that hand out addresses, or memory that is not the caching allocator's.
_UNDER_THE_ALLOCATOR = (
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_enable",
    "change_current_allocator",
)


def memory_answers(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Return the functions that ask about memory by name; all of them tell of one replay."""

    def current(name: str) -> Callable[..., int]:
        return lambda device=None: getattr(memory.follow().statistics.all, name).current

    def peak(name: str) -> Callable[..., int]:
        return lambda device=None: getattr(memory.follow().statistics.all, name).peak

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory.follow()
        return memory.free, memory.gpu.memory

    return {
        "memory_allocated": current("allocated_bytes"),
        "max_memory_allocated": peak("allocated_bytes"),
        "memory_reserved": current("reserved_bytes"),
        "max_memory_reserved": peak("reserved_bytes"),
        "memory_cached": current("reserved_bytes"),
        "max_memory_cached": peak("reserved_bytes"),
        "memory_stats": lambda device=None: OrderedDict(memory.statistics()),
        "memory_stats_as_nested_dict": lambda device=None: _nested(memory.statistics()),
        "memory_summary": lambda device=None, abbreviated=False: _SUMMARY(device, abbreviated),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: segments(memory.follow()),
        "_snapshot": lambda device=None, augment_with_fx_traces=False: {
            "segments": segments(memory.follow()),
            "device_traces": [[]],
            "external_annotations": [],
        },
        "mem_get_info": mem_get_info,
        "reset_peak_memory_stats": lambda device=None: memory.follow().statistics.reset_peaks(),
        "reset_max_memory_allocated": lambda device=None: memory.follow().statistics.reset_peaks(),
        "reset_max_memory_cached": lambda device=None: memory.follow().statistics.reset_peaks(),
        "reset_accumulated_memory_stats": lambda device=None: (
            memory.follow().statistics.reset_totals()
        ),
        "empty_cache": memory.empty_cache,
        "set_per_process_memory_fraction": lambda fraction, device=None: _set_fraction(
            memory, fraction
        ),
        "get_per_process_memory_fraction": lambda device=None: _fraction(memory),
        "_set_allocator_settings": lambda env: memory.set_options(
            parse_options(env, memory.allocator.options)
        ),
        "get_allocator_backend": lambda: "native",
        "device_memory_used": lambda device=None: memory.gpu.memory - mem_get_info()[0],
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "reset_accumulated_host_memory_stats": lambda: None,
        "reset_peak_host_memory_stats": lambda: None,
        **{name: _refused(name) for name in _UNDER_THE_ALLOCATOR},
        "_record_memory_history": lambda *args, **kwargs: None,
    }


def segments(allocator: CachingAllocator) -> list[dict[str, Any]]:
    """Return the segments and their blocks as ``torch.cuda.memory_snapshot`` does."""
    found: list[dict[str, Any]] = []
    last: Block | None = None
    for block in allocator.blocks():
        if last is None or block.before is not last:
            found.append(
                {
                    "device": 0,
                    "address": block.address,
                    "total_size": 0,
                    "allocated_size": 0,
                    "active_size": 0,
                    "requested_size": 0,
                    "stream": block.stream,
                    "segment_type": "small" if block.pool.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": block.expandable is not None,
                    "frames": [],
                    "blocks": [],
                }
            )
        segment, last = found[-1], block
        active = block.allocated or block.waiting is not None
        segment["total_size"] += block.size
        segment["allocated_size"] += block.size if block.allocated else 0
        segment["active_size"] += block.size if active else 0
        segment["requested_size"] += block.requested if active else 0
        segment["blocks"].append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested if active else 0,
                "state": (
                    "active_allocated"
                    if block.allocated
                    else "active_pending_free"
                    if active
                    else "inactive"
                ),
                "frames": [],
            }
        )
    return found


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"torch.cuda.{name}: a trace knows the memory of tensors, and no address on the GPU. "
            "Make a tensor of that size, or leave the call out of what is traced"
        )

    return refuse


def _nested(statistics: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in statistics.items():
        *outer, last = name.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _set_fraction(memory: DeviceMemory, fraction: Any) -> None:
    # As torch.cuda.memory.set_per_process_memory_fraction.
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory.set_memory_fraction(fraction)


def _fraction(memory: DeviceMemory) -> float:
    allowed = memory.allocator.allowed
    return 1.0 if allowed is None else allowed / memory.gpu.memory
