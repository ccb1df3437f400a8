"""A figure over the commits of its snapshot as an SVG: a line of steps for each device."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_torchmem.profile.pictures.svg import (
    COLORS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    escaped,
    grid,
    picture,
)
from pytest_torchmem.units import format_size

_TOP, _BOTTOM = 60, 40
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
    """Return the picture, 800 pixels wide and 280 high, for light and dark pages.

    Commits stand beside each other in order, however long one was the latest.
    """
    moments = sorted({(one.place, one.date) for line in lines for one in line.points})
    places = {moment[0]: place for place, moment in enumerate(moments)}
    most = max((one.nbytes for line in lines for one in line.points), default=1) or 1
    step = (WIDTH - LEFT - RIGHT) / len(moments)
    parts = [*grid(most, lambda nbytes: _y(nbytes, most), 8)]
    parts += _dates([date for _, date in moments], step)
    for index, line in enumerate(lines):
        colour = COLORS[index % len(COLORS)]
        parts += _steps(line, places, step, most, len(moments), colour)
        parts += _legend(index, line, colour)
    return picture(title, parts)


def _y(nbytes: int, most: int) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * nbytes / most


def _dates(dates: Sequence[str], step: float) -> Iterator[str]:
    every = -(-len(dates) // _MOST_LABELS)
    for place in range(0, len(dates), every):
        x = LEFT + step * place
        yield (
            f'<text class="muted" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}">'
            f"{escaped(dates[place])}</text>"
        )


def _steps(
    line: Line,
    places: dict[int, int],
    step: float,
    most: int,
    count: int,
    colour: str,
) -> Iterator[str]:
    corners: list[str] = []
    for index, point in enumerate(line.points):
        following = line.points[index + 1 : index + 2]
        end = places[following[0].place] if following else count
        y = _y(point.nbytes, most)
        for place in (places[point.place], end):
            corners.append(f"{LEFT + step * place:.1f},{y:.1f}")
        text = escaped(
            " ".join(filter(None, (point.date, point.commit, format_size(point.nbytes))))
        )
        x = LEFT + step * places[point.place]
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{text}</title>'
            "</circle>"
        )
    yield f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(corners)}"/>'


def _legend(index: int, line: Line, colour: str) -> Iterator[str]:
    x = LEFT + index * 350
    yield f'<rect x="{x}" y="32" width="10" height="10" rx="2" fill="{colour}"/>'
    yield f'<text x="{x + 15}" y="41">{escaped(line.name)}</text>'
