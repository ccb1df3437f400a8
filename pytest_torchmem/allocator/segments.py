"""What an allocator has, as torch describes it."""

from typing import Any

from pytest_torchmem.allocator.blocks import Block, PoolId
from pytest_torchmem.allocator.caching import CachingAllocator


def segments(
    allocator: CachingAllocator, index: int = 0, pool: PoolId | None = None
) -> list[dict[str, Any]]:
    """Return the segments and their blocks as ``torch.cuda.memory_snapshot`` does.

    Those of one private ``pool``, or all.
    """
    found: list[dict[str, Any]] = []
    last: Block | None = None
    for block in allocator.blocks():
        if pool not in (None, block.pool.owner):
            continue
        if last is None or block.before is not last:
            found.append(
                {
                    "device": index,
                    "address": block.address,
                    "total_size": 0,
                    "allocated_size": 0,
                    "active_size": 0,
                    "requested_size": 0,
                    "stream": block.stream,
                    "segment_type": "small" if block.pool.is_small else "large",
                    "segment_pool_id": block.pool.owner,
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
