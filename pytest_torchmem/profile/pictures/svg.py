"""The memory of a step as an SVG: bytes alive by kind, phases, and the peak."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from xml.sax.saxutils import escape

from pytest_torchmem.printable import printable
from pytest_torchmem.profile.sampled import Alike, Stack, by_kind, phases, samples, stacked
from pytest_torchmem.profile.timeline import Timeline
from pytest_torchmem.units import format_size

COLORS = (
    "#4269d0",
    "#efb118",
    "#ff725c",
    "#6cc5b0",
    "#3ca951",
    "#ff8ab7",
    "#a463f2",
    "#97bbf5",
    "#9c6b4e",
    "#9498a0",
)
"""The colours of groups, the largest first: Observable's categorical palette."""

WIDTH, HEIGHT = 800, 280
LEFT, RIGHT, _TOP, _BOTTOM = 80, 16, 44, 44
_SAMPLES = 400
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.title{font-weight:600;font-size:14px}"
    ".muted{fill:#656d76}.grid{stroke:#d0d7de}.peak{stroke:#24292f;stroke-dasharray:4 3}"
    ".back{fill:#ffffff}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.muted{fill:#8d96a0}"
    ".grid{stroke:#30363d}.peak{stroke:#e6edf3}.back{fill:#0d1117}}"
)


def svg(title: str, timeline: Timeline) -> str:
    """Return the picture, 800 pixels wide and 280 high, for light and dark pages."""
    positions = samples(timeline, _SAMPLES)
    stack = stacked(Alike(timeline), positions, by_kind, len(COLORS))
    live = timeline.live()
    peak = max(live)
    scale = _Scale(len(timeline.events), peak)
    parts = (
        grid(scale.peak, scale.y, 6),
        _areas(scale, positions, stack),
        _phase_labels(scale, timeline),
        _peak(scale, live.index(peak), peak),
        _legend(stack),
    )
    return picture(title, chain.from_iterable(parts))


def picture(title: str, parts: Iterable[str]) -> str:
    """Return an SVG of a size with a title and what is drawn below it."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escaped(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="20">{escaped(title)}</text>',
    )
    return "\n".join((*head, *parts, "</svg>")) + "\n"


def grid(most: int, y_of: Callable[[int], float], gap: int) -> Iterator[str]:
    """Yield lines across a picture at quarters of the most bytes, named beside it."""
    for part in range(5):
        nbytes = most * part // 4
        y = y_of(nbytes)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="muted" x="{LEFT - gap}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_size(nbytes)}</text>"
        )


class _Scale:
    """From events and bytes to pixels."""

    def __init__(self, events: int, peak: int) -> None:
        self.events, self.peak = max(1, events), max(1, peak)

    def x(self, position: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * position / self.events

    def y(self, nbytes: int) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * nbytes / self.peak

    def point(self, position: int, nbytes: int) -> str:
        return f"{self.x(position):.1f},{self.y(nbytes):.1f}"


def _areas(scale: _Scale, positions: Sequence[int], stack: Stack) -> Iterator[str]:
    below = [0] * len(positions)
    for name, series, color in zip(stack.names, stack.series, COLORS, strict=False):
        above = [low + own for low, own in zip(below, series, strict=True)]
        top = list(map(scale.point, positions, above))
        bottom = list(map(scale.point, positions, below))
        points = " ".join((*top, *reversed(bottom)))
        yield f'<polygon fill="{color}" points="{points}"><title>{escaped(name)}</title></polygon>'
        below = above


def _phase_labels(scale: _Scale, timeline: Timeline) -> Iterator[str]:
    for start, stop, phase in phases(timeline):
        left, right = scale.x(start), scale.x(stop)
        y = HEIGHT - _BOTTOM
        yield f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{y + 6}"/>'
        if right - left > 7 * len(phase.value):
            yield (
                f'<text class="muted" x="{(left + right) / 2:.1f}" y="{y + 16}" '
                f'text-anchor="middle">{phase.value}</text>'
            )


def _peak(scale: _Scale, position: int, nbytes: int) -> Iterator[str]:
    x = scale.x(position)
    side, shift = ("start", 5) if x < WIDTH / 2 else ("end", -5)
    yield f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{HEIGHT - _BOTTOM}"/>'
    yield (
        f'<text x="{x + shift:.1f}" y="38" text-anchor="{side}">'
        f"peak {format_size(nbytes)} ({nbytes:,} bytes)</text>"
    )


def _legend(stack: Stack) -> Iterator[str]:
    x = float(LEFT)
    for name, color in zip(stack.names, COLORS, strict=False):
        yield f'<rect x="{x:.0f}" y="{HEIGHT - 18}" width="10" height="10" fill="{color}"/>'
        yield f'<text class="muted" x="{x + 14:.0f}" y="{HEIGHT - 9}">{escaped(name)}</text>'
        x += 28 + 6.5 * len(name)


def escaped(text: str) -> str:
    """Return text as XML and its attributes have it, which know no control characters."""
    return escape(printable(text), {'"': "&quot;"})
