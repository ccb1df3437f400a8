"""A timeline as one line of characters."""

from __future__ import annotations

from pytest_torchmem.profile.timeline import Timeline

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(timeline: Timeline, width: int = 40) -> str:
    """Return the largest bytes alive in each of ``width`` equal stretches, from 0 to the peak."""
    live = timeline.live_bytes()
    peak, width = max(live, default=0), min(width, len(live))
    if peak <= 0:
        return ""
    highest = (
        max(live[number * len(live) // width : (number + 1) * len(live) // width])
        for number in range(width)
    )
    return "".join(_LEVELS[min(7, 8 * nbytes // peak)] for nbytes in highest)
