"""What ``PYTORCH_ALLOC_CONF`` says about how the caching allocator keeps memory.

The keys, their bounds and the words of their errors are those of c10/core/AllocatorConfig.cpp
(``AcceleratorAllocatorConfig``) and c10/cuda/CUDAAllocatorConfig.cpp.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pytest_torchmem.errors import UsageError, meant

MIB = 1024**2
#: Powers of two from 1 MiB to 64 GiB have divisions of their own (``kRoundUpPowerOfTwoIntervals``).
_INTERVALS = 16

_WITHOUT_EFFECT = frozenset(
    {
        "pinned_use_background_threads",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)
"""Keys about host memory, locks, graphs and when an error is raised; none moves a byte here."""


@dataclass(frozen=True, slots=True, repr=False)
class AllocatorOptions:
    """The caching allocator's options; sizes in bytes. The defaults are torch's."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks of this size or more are never split; ``None`` is no such size."""
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0


DEFAULTS = AllocatorOptions()
_Parser: TypeAlias = Callable[[AllocatorOptions, list[str]], AllocatorOptions]


def parse_options(text: str, before: AllocatorOptions = DEFAULTS) -> AllocatorOptions:
    """Return the options that ``text`` says, written as for ``PYTORCH_ALLOC_CONF``.

    ``"expandable_segments:True,max_split_size_mb:512"``. Keys that say nothing about device memory
    are accepted and do nothing. What the text does not say is as ``before``, but for the three keys
    that torch sets back each time it is given options (``parseArgs``).

    Raises ``UsageError``, with what torch would say, for anything that torch would not take, and
    for ``backend:cudaMallocAsync``, which is another allocator.
    """
    if not isinstance(text, str):
        raise UsageError(
            f"allocator={text!r}: write the options as for PYTORCH_ALLOC_CONF, such as "
            "'expandable_segments:True' or 'max_split_size_mb:512'"
        )
    options = replace(
        before,
        max_split_size=DEFAULTS.max_split_size,
        roundup_power2_divisions=DEFAULTS.roundup_power2_divisions,
        garbage_collection_threshold=DEFAULTS.garbage_collection_threshold,
    )
    try:
        for key, value in _pairs(text):
            options = _with(options, key, value)
    except ValueError as error:
        raise UsageError(f"allocator={text!r}: {error}") from None
    return options


def _pairs(text: str) -> Iterator[tuple[str, list[str]]]:
    tokens = [token for token in re.split(r"([,:\[\]])", re.sub(r"\s", "", text)) if token]
    position = 0
    while position < len(tokens):
        key = tokens[position]
        if tokens[position + 1 : position + 2] != [":"] or position + 2 >= len(tokens):
            raise ValueError(f"expected '{key}:<value>'")
        if tokens[position + 2] == "[":
            if "]" not in tokens[position:]:
                raise ValueError(
                    "Expected closing bracket ']' in ConfigTokenizer but reached end of config"
                )
            end = tokens.index("]", position)
            yield key, tokens[position + 3 : end]
        else:
            end = position + 2
            yield key, [tokens[end]]
        position = end + 1
        if position < len(tokens):
            if tokens[position] != ",":
                raise ValueError(f"expected ',' before {tokens[position]!r}")
            position += 1


def _with(options: AllocatorOptions, key: str, value: list[str]) -> AllocatorOptions:
    parse = _PARSERS.get(key)
    if parse is not None:
        return parse(options, value)
    if key in _WITHOUT_EFFECT:
        return options
    guess = meant(key, (*_PARSERS, *_WITHOUT_EFFECT), cutoff=0.6)
    raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.{guess}")


def _expandable_segments(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    if value not in (["True"], ["False"]):
        raise ValueError(
            f"Expected 'True' or 'False' for expandable_segments but got '{''.join(value)}'"
        )
    return replace(options, expandable_segments=value == ["True"])


def _size(key: str) -> _Parser:
    """Return what sets a size in MiB, which is not below that of the large pool's segments."""

    def parse(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
        least = options.large_segment_size // MIB
        mib = _whole(value)
        if mib < least:
            raise ValueError(f"CachingAllocator option {key}_mb too small, must be >= {least}")
        changed: dict[str, Any] = {key: mib * MIB}
        return replace(options, **changed)

    return parse


def _large_segment_size(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    mib = _whole(value)
    if mib <= 10:
        raise ValueError("CachingAllocator option large_segment_size_mb must be > 10 MB")
    return replace(options, large_segment_size=mib * MIB)


def _garbage_collection_threshold(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    threshold = float(value[0])
    if not 0 < threshold < 1:
        raise ValueError("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
    return replace(options, garbage_collection_threshold=threshold)


def _memory_fraction(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    fraction = float(value[0])
    if not 0 <= fraction <= 1:
        raise ValueError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return replace(options, memory_fraction=fraction)


def _backend(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    if value == ["cudaMallocAsync"]:
        raise ValueError(
            "backend:cudaMallocAsync is CUDA's own allocator, and how it keeps memory is not "
            "known; a trace replays backend:native"
        )
    if value != ["native"]:
        raise ValueError("Unknown allocator backend, options are native and cudaMallocAsync")
    return options


def _roundup_power2_divisions(options: AllocatorOptions, value: list[str]) -> AllocatorOptions:
    """One number for all sizes, or ``[256:1,512:2,>:8]``: MiB from which on, and divisions."""
    if value and ":" not in value:
        divisions = _whole(value)
        _power_of_two(divisions, "For roundups, the divisions has to be power of 2 ")
        return replace(options, roundup_power2_divisions=(divisions,) * _INTERVALS)
    if not value:
        return options
    table = list(options.roundup_power2_divisions)
    last, first = 0, True
    for pair in "".join(value).split(","):
        boundary, _, written = pair.partition(":")
        divisions = _whole([written])
        if divisions:
            _power_of_two(
                divisions,
                "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
            )
        if boundary == ">":
            table[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
            continue
        mib = _whole([boundary])
        _power_of_two(mib, "For roundups, the intervals have to be power of 2 ")
        index = min(mib.bit_length() - 1, _INTERVALS - 1)
        if first:
            table[:index] = [divisions] * index
            first = False
        table[index] = divisions
        last = index
    return replace(options, roundup_power2_divisions=tuple(table))


def _whole(value: list[str]) -> int:
    if len(value) != 1 or not value[0].isdigit():
        raise ValueError(f"expected a whole number, not {''.join(value)!r}")
    return int(value[0])


def _power_of_two(number: int, message: str) -> None:
    if number <= 0 or number & (number - 1):
        raise ValueError(message.strip())


_PARSERS: dict[str, _Parser] = {
    "expandable_segments": _expandable_segments,
    "max_split_size_mb": _size("max_split_size"),
    "max_non_split_rounding_mb": _size("max_non_split_rounding"),
    "large_segment_size_mb": _large_segment_size,
    "roundup_power2_divisions": _roundup_power2_divisions,
    "garbage_collection_threshold": _garbage_collection_threshold,
    "per_process_memory_fraction": _memory_fraction,
    "backend": _backend,
}
