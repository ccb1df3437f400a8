"""Pictures as SVG: the memory of a step, and a figure over the commits of its snapshot."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple
from xml.sax.saxutils import escape

from pytest_torchmem.printable import printable
from pytest_torchmem.profile.sampled import Alike, Stack, by_kind, samples, stacked
from pytest_torchmem.profile.timeline import Timeline, phases
from pytest_torchmem.units import format_size

_COLORS = (
    *("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951"),
    *("#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0"),
)
"""The colours of groups, the largest first: Observable's categorical palette."""

_WIDTH, _HEIGHT = 800, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 16, 44, 44
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
    stack = stacked(Alike(timeline), positions, by_kind, len(_COLORS))
    live = timeline.live()
    peak = max(live)
    scale = _Scale(len(timeline.events), peak)
    parts = (
        _grid(scale, 6),
        _areas(scale, positions, stack),
        _phase_labels(scale, timeline),
        _peak(scale, live.index(peak), peak),
        _legend(stack),
    )
    return picture(title, chain.from_iterable(parts))


def picture(title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escaped(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escaped(title)}</text>',
    )
    return "\n".join((*head, *parts, "</svg>")) + "\n"


class _Scale:
    def __init__(self, events: int, peak: int, above: int = _TOP, below: int = _BOTTOM) -> None:
        self.events, self.peak = max(1, events), max(1, peak)
        self._above, self.bottom = above, _HEIGHT - below

    def x(self, position: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * position / self.events

    def y(self, nbytes: int) -> float:
        return self.bottom - (self.bottom - self._above) * nbytes / self.peak

    def point(self, position: int, nbytes: int) -> str:
        return f"{self.x(position):.1f},{self.y(nbytes):.1f}"


def _grid(scale: _Scale, gap: int) -> Iterator[str]:
    """Yield lines across a picture at quarters of the most bytes, named beside it."""
    for part in range(5):
        nbytes = scale.peak * part // 4
        y = scale.y(nbytes)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield (
            f'<text class="muted" x="{_LEFT - gap}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_size(nbytes)}</text>"
        )


def _areas(scale: _Scale, positions: Sequence[int], stack: Stack) -> Iterator[str]:
    below = [0] * len(positions)
    for name, series, color in zip(stack.names, stack.series, _COLORS, strict=False):
        above = [low + own for low, own in zip(below, series, strict=True)]
        top = list(map(scale.point, positions, above))
        bottom = list(map(scale.point, positions, below))
        points = " ".join((*top, *reversed(bottom)))
        yield f'<polygon fill="{color}" points="{points}"><title>{escaped(name)}</title></polygon>'
        below = above


def _phase_labels(scale: _Scale, timeline: Timeline) -> Iterator[str]:
    for start, stop, phase in phases(timeline):
        left, right, y = scale.x(start), scale.x(stop), scale.bottom
        yield f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{y + 6}"/>'
        if right - left > 7 * len(phase.value):
            yield (
                f'<text class="muted" x="{(left + right) / 2:.1f}" y="{y + 16}" '
                f'text-anchor="middle">{phase.value}</text>'
            )


def _peak(scale: _Scale, position: int, nbytes: int) -> Iterator[str]:
    x = scale.x(position)
    side, shift = ("start", 5) if x < _WIDTH / 2 else ("end", -5)
    yield f'<line class="peak" x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{scale.bottom}"/>'
    yield (
        f'<text x="{x + shift:.1f}" y="38" text-anchor="{side}">'
        f"peak {format_size(nbytes)} ({nbytes:,} bytes)</text>"
    )


def _legend(stack: Stack) -> Iterator[str]:
    x = float(_LEFT)
    for name, color in zip(stack.names, _COLORS, strict=False):
        yield f'<rect x="{x:.0f}" y="{_HEIGHT - 18}" width="10" height="10" fill="{color}"/>'
        yield f'<text class="muted" x="{x + 14:.0f}" y="{_HEIGHT - 9}">{escaped(name)}</text>'
        x += 28 + 6.5 * len(name)


def escaped(text: str) -> str:
    """Return text as XML and its attributes have it, which know no control characters."""
    return escape(printable(text), {'"': "&quot;"})


_ABOVE, _BELOW = 60, 40
_MOST_LABELS = 8


class Point(NamedTuple):
    """What a figure was from a commit on."""

    place: int
    """The commit's, among all that are shown."""
    date: str
    commit: str
    """Shortened; "" for the working tree."""
    nbytes: int


class Line(NamedTuple):
    """A figure of one device, the earliest first."""

    name: str
    points: tuple[Point, ...]


def history_svg(title: str, lines: Sequence[Line]) -> str:
    """Return the picture; commits stand beside each other, however long one was the latest."""
    moments = sorted({(one.place, one.date) for line in lines for one in line.points})
    places = {moment[0]: place for place, moment in enumerate(moments)}
    most = max((one.nbytes for line in lines for one in line.points), default=1)
    scale = _Scale(len(moments), most, _ABOVE, _BELOW)
    parts = [*_grid(scale, 8), *_dates([date for _, date in moments], scale)]
    for index, line in enumerate(lines):
        colour = _COLORS[index % len(_COLORS)]
        parts += _steps(line, places, scale, colour)
        x = _LEFT + index * 350
        parts.append(f'<rect x="{x}" y="32" width="10" height="10" rx="2" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="41">{escaped(line.name)}</text>')
    return picture(title, parts)


def _dates(dates: Sequence[str], scale: _Scale) -> Iterator[str]:
    every = -(-len(dates) // _MOST_LABELS)
    for place in range(0, len(dates), every):
        yield (
            f'<text class="muted" x="{scale.x(place):.1f}" y="{scale.bottom + 18}">'
            f"{escaped(dates[place])}</text>"
        )


def _steps(line: Line, places: dict[int, int], scale: _Scale, colour: str) -> Iterator[str]:
    corners: list[str] = []
    ends = [*(places[one.place] for one in line.points[1:]), scale.events]
    for point, end in zip(line.points, ends, strict=True):
        start, nbytes = places[point.place], point.nbytes
        corners += scale.point(start, nbytes), scale.point(end, nbytes)
        text = escaped(" ".join(filter(None, (point.date, point.commit, format_size(nbytes)))))
        x, y = scale.x(start), scale.y(nbytes)
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{text}</title>'
            "</circle>"
        )
    yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(corners)}"/>'
