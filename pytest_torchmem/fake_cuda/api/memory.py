"""The memory functions of ``torch.cuda`` and ``torch.accelerator`` in a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from pytest_torchmem.allocator.blocks import PoolId
from pytest_torchmem.allocator.options import parse_options
from pytest_torchmem.allocator.segments import segments
from pytest_torchmem.fake_cuda.memory import DeviceMemory

#: torch's own function goes through its own ``memory_stats``, which is replaced here.
_SUMMARY: Callable[..., str] = torch.cuda.memory_summary


def memory_functions(
    memory: DeviceMemory, memories: Sequence[DeviceMemory]
) -> dict[str, Callable[..., Any]]:
    """Return the functions about a GPU's memory by name; all of them tell of one replay.

    A snapshot tells of the ``memories`` of all GPUs.
    """

    def all_segments(pool: PoolId | None = None) -> list[dict[str, Any]]:
        of_each = [segments(one.follow(), index, pool) for index, one in enumerate(memories)]
        return [segment for found in of_each for segment in found]

    def snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        traces: list[list[Any]] = [[] for _ in memories]
        return {"segments": all_segments(), "device_traces": traces, "external_annotations": []}

    return {
        **_figures(memory),
        "memory_stats": lambda device=None: OrderedDict(memory.statistics()),
        "memory_stats_as_nested_dict": lambda device=None: _nested(memory.statistics()),
        "memory_summary": lambda device=None, abbreviated=False: _SUMMARY(device, abbreviated),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: all_segments(mempool_id),
        "_snapshot": snapshot,
        "_record_memory_history": lambda *args, **kwargs: None,
        "mem_get_info": lambda device=None: memory.free_and_total(),
        "device_memory_used": lambda device=None: memory.gpu.memory - memory.free_and_total()[0],
        "reset_accumulated_memory_stats": lambda device=None: (
            memory.follow().statistics.reset_totals()
        ),
        "empty_cache": lambda: _empty_caches(memories),
        "set_per_process_memory_fraction": lambda fraction, device=None: _set_fraction(
            memory, fraction
        ),
        "get_per_process_memory_fraction": lambda device=None: (
            1.0 if (allowed := memory.allocator.allowed) is None else allowed / memory.gpu.memory
        ),
        "_set_allocator_settings": lambda env: memory.set_options(
            parse_options(env, memory.allocator.options)
        ),
        "get_allocator_backend": lambda: "native",
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "reset_accumulated_host_memory_stats": lambda: None,
        "reset_peak_host_memory_stats": lambda: None,
    }


def _figures(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Return the functions that give one figure of the allocator's statistics, or reset peaks."""

    def reset_peaks(device: Any = None) -> None:
        memory.follow().statistics.reset_peaks()

    def figure(name: str, part: str) -> Callable[..., int]:
        in_all = attrgetter(f"all.{name}_bytes.{part}")
        return lambda device=None: in_all(memory.follow().statistics)

    functions: dict[str, Callable[..., Any]] = dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        reset_peaks,
    )
    for name in ("allocated", "reserved", "cached"):
        counted = "reserved" if name == "cached" else name
        functions[f"memory_{name}"] = figure(counted, "current")
        functions[f"max_memory_{name}"] = figure(counted, "peak")
    return functions


def _empty_caches(memories: Sequence[DeviceMemory]) -> None:
    for memory in memories:
        memory.empty_cache()


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
