"""What came, what went and what became larger between two steps, at one moment of each.

Rows are data; their changes add up to the change of the figure. What a snapshot did not record is
never made up: such a row has no bytes before, and says so.

Lines that moved are recognised first; ``names.py`` has recognised modules of other names.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import eq

from pytest_torchmem.profile.module_paths import EveryNumber, only_in, read_numbers, unfold
from pytest_torchmem.profile.timeline import Role
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.format import Entry

_Placed = tuple[int, str, str, str, str]
"""An operator: its line, module and name, the numbers of modules, and the role of its output."""
OF_BACKWARD = (Role.GRADIENT, Role.GRADIENT_TEMPORARY, Role.WORKSPACE)
"""What operators make that the program has not called by themselves."""


def moved_lines(before: Collection[Group], now: Collection[Group]) -> dict[str, str]:
    """Return by the lines of a snapshot what they are now, where as much is there as was.

    Of each file the operators of both are laid side by side in the order of their lines, as
    ``diff`` does with the lines themselves, which a snapshot does not keep: as many as may be, and
    moved by as few distances, and as little. Those of the same modules come first: the next of two
    loops over layers is not the one before.
    """
    found: dict[str, str] = {}
    for of_numbers in (True, False):
        old, new = _by_file(before, of_numbers), _by_file(now, of_numbers)
        for file in old.keys() & new.keys():
            for line, present in _side_by_side(sorted(old[file]), sorted(new[file])):
                found.setdefault(f"{file}:{line}", f"{file}:{present}")
    return found


def _side_by_side(then: Sequence[_Placed], there: Sequence[_Placed]) -> Iterable[tuple[int, int]]:
    """Return the lines of equal operators, then and now, in the order of both."""
    pairs = [(was, now) for was in then for now in there if was[1:-1] == now[1:-1]]
    moved = [now[0] - was[0] for was, now in pairs]
    best: list[tuple[int, int, int, int, int]] = []
    """Of those that end in each pair: how many, minus how often the distance changes, how many of
    one role, minus how far they moved, and the pair before."""
    for at, (was, now) in enumerate(pairs):
        same = was[-1] == now[-1]
        far = -abs(moved[at])
        ends = [(1, -(moved[at] != 0), int(same), far, -1)]
        for one, (count, changes, alike, way, _) in enumerate(best):
            if pairs[one][0] < was and pairs[one][1] < now:
                changes -= moved[one] != moved[at]
                ends.append((count + 1, changes, alike + same, way + far, one))
        best.append(max(ends))
    at = max(range(len(best)), key=lambda one: best[one][:-1], default=-1)
    while at >= 0:
        yield pairs[at][0][0], pairs[at][1][0]
        at = best[at][-1]


def _by_file(groups: Iterable[Group], of_numbers: bool) -> dict[str, set[_Placed]]:
    found: dict[str, set[_Placed]] = {}
    for group in groups:
        one = group.what
        file, _, number = one.line.rpartition(":")
        # Of several equal calls a backward is that of one alone, the last of the forward.
        if number.isdecimal() and one.role not in OF_BACKWARD:
            numbers = group.numbers if of_numbers else ""
            own = int(number), one.module, one.source, numbers, one.role
            found.setdefault(file, set()).add(own)
    return found


_Key = Callable[[What], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """Equal allocations, then and now; one of both sides may be missing."""

    before: What | None
    now: What | None
    count_before: int
    count_now: int
    numbers: str = ""
    """Which modules of the pattern it is about, as ``write_numbers`` writes it."""

    @property
    def what(self) -> What:
        """The present side, or that of what went."""
        found = self.now or self.before
        assert found is not None
        return found

    @property
    def bytes_now(self) -> int:
        """The bytes of the present side."""
        return self.now.nbytes * self.count_now if self.now is not None else 0

    @property
    def change(self) -> int:
        """The bytes by which it grew."""
        was = self.before.nbytes * self.count_before if self.before is not None else 0
        return self.bytes_now - was

    @property
    def is_resized(self) -> bool:
        """Whether tensors of another shape stood in its place."""
        before, now = self.before, self.now
        return bool(before and now and before.dtype and now.dtype and before.shape != now.shape)

    @property
    def place(self) -> tuple[str, str]:
        """The pattern of the module, and the line."""
        return self.what.module, self.what.line

    @property
    def module(self) -> str:
        """The module's path, with the numbers of those that it is about."""
        return unfold(self.what.module, self.numbers)


@dataclass(frozen=True, slots=True)
class MomentDifference:
    """How what is alive at one moment differs from what was."""

    moment: str
    """The figure's name."""
    before: int
    now: int
    rows: tuple[Row, ...] = ()
    """The largest change first; without those that changed nothing."""
    moved: tuple[Row, ...] = ()
    """What is as large as it was, and stands elsewhere or for something else."""
    rest: int = 0
    """By how much everything changed that neither side names."""
    recorded: bool = True
    """Whether the snapshot has what rows need."""

    @property
    def change(self) -> int:
        """The bytes by which the figure grew."""
        return self.now - self.before

    @property
    def came(self) -> tuple[Row, ...]:
        """The rows that grew."""
        return tuple(row for row in self.rows if row.change > 0)


def difference(before: Entry, now: Alive, moment: str, more: Collection[Group]) -> MomentDifference:
    """Return how ``now`` differs from an entry at ``moment``, the name of a figure."""
    total = now.total(moment)
    old = before.figures.get(moment, 0)
    if before.alive is None or (moment in before.figures and moment not in before.alive.moments):
        return MomentDifference(moment, old, total, recorded=False)
    return difference_between(before.alive, now, moment, old, more)


def difference_between(
    known: Alive, now: Alive, moment: str, figure: int | None = None, more: Collection[Group] = ()
) -> MomentDifference:
    """Return how ``now`` differs from what is ``known`` at a moment that both have.

    ``figure`` is what was alive then, where it is known from elsewhere; ``more`` are the operators
    that are known to be called more often, where they are.
    """
    total, old = now.total(moment), known.total(moment) if figure is None else figure
    lines, anew = moved_lines(known.groups, (*now.groups, *more)), {one.what.source for one in more}
    groups = (
        replace(one, what=one.what._replace(line=lines.get(one.what.line, one.what.line)))
        for one in known.groups
    )
    known = replace(known, groups=tuple(groups))
    left, left_now = _Remaining(known.groups, moment), _Remaining(now.groups, moment)
    rows: list[Row] = []
    moved: list[Row] = []
    for key in _SAME:
        for was, one, number in _pairs(left, left_now, key):
            left.take(was, number)
            left_now.take(one, number)
            if (was.what.role, was.what.source) != (one.what.role, one.what.source):
                moved.append(Row(was.what, one.what, number, number, one.numbers))
    there = {(one.what.module, number) for one in now.groups for number in _numbers(one.numbers)}
    # First without what is less than a snapshot keeps: nothing that it does keep stands for it.
    for key, least in product(_ALIKE, (known.floor(moment), 0)):
        for was, one in _replaced(left, left_now, key, least):
            is_another = was.what.source in anew and was.what.line != one.what.line
            if is_another or not _are_alike(was, one, there):
                continue
            same = one.numbers == was.numbers or one.what.module != was.what.module
            numbers = one.numbers if same else only_in(one.numbers, was.numbers)
            was_count, count = left.counts.pop(was), left_now.counts.pop(one)
            rows.append(Row(was.what, one.what, was_count, count, numbers))
    then = {group.what[:6]: group.numbers for group in known.groups}
    present = {group.what[:6]: group.numbers for group in now.groups}
    rows += [
        Row(None, one.what, 0, count, only_in(one.numbers, then.get(one.what[:6], "")))
        for one, count in left_now.counts.items()
        if one.what.nbytes * count > known.floor(moment)
    ]
    rows += [
        Row(was.what, None, count, 0, only_in(was.numbers, present.get(was.what[:6], "")))
        for was, count in left.counts.items()
        if was.what.nbytes * count > now.floor(moment)
    ]
    every = EveryNumber()
    for group in (*known.groups, *now.groups):
        every.add(group.what.module, group.numbers)
    rows, moved = (
        [replace(row, numbers=every.marked(row.what.module, row.numbers)) for row in side]
        for side in (rows, moved)
    )
    rest = total - old - sum(row.change for row in rows)
    changed = [row for row in rows if row.change]
    changed.sort(key=lambda row: (-abs(row.change), row.what))
    moved += [row for row in rows if not row.change]
    return MomentDifference(moment, old, total, tuple(changed), tuple(moved), rest)


class _Remaining:
    """The groups of one side, and how many allocations of each are not matched so far."""

    def __init__(self, groups: Iterable[Group], moment: str) -> None:
        self.counts = {
            group: group.counts[moment] for group in map(_Hashed, groups) if moment in group.counts
        }

    def take(self, group: "_Hashed", number: int) -> None:
        left = self.counts[group] - number
        if left:
            self.counts[group] = left
        else:
            del self.counts[group]

    def by(self, key: _Key, least: int = -1) -> "dict[tuple[object, ...], list[_Hashed]]":
        """Return the groups of more than so many bytes, by what they are the same by."""
        found: dict[tuple[object, ...], list[_Hashed]] = {}
        for group, count in self.counts.items():
            if group.what.nbytes * count > least:
                found.setdefault(key(group.what), []).append(group)
        return found


class _Hashed:
    """A group by its identity: two of one side are never the same."""

    __slots__ = ("counts", "numbers", "what")

    def __init__(self, group: Group) -> None:
        self.what, self.counts, self.numbers = group.what, group.counts, group.numbers


_SAME: tuple[_Key, ...] = (
    lambda w: tuple(w),
    lambda w: (*w[:5], w.nbytes, w.line.rpartition(":")[0]),  # the line has moved
    lambda w: (*w[:5], w.nbytes),
    lambda w: (w.role, w.source, w.dtype, w.shape, w.nbytes, w.line),  # a module was renamed
    lambda w: (w.role, w.source, w.dtype, w.shape, w.nbytes),
    lambda w: (w.module, w.source, w.dtype, w.shape, w.nbytes),  # it lives longer or shorter
    lambda w: (w.role, w.module, w.dtype, w.shape, w.nbytes) if w.dtype else (id(w),),
    lambda w: (w.role, w.module, w.dtype, w.nbytes) if w.dtype else (id(w),),  # of another shape
)
"""By what two groups of equal bytes are the same; of each, what is left goes to the next, and to
the last two only what other operators make as often."""
_ALIKE: tuple[_Key, ...] = (
    lambda w: (w.role, w.module, w.source, w.line, w.shape),  # another type
    lambda w: (w.role, w.module, w.source, w.shape),
    lambda w: (w.role, w.module, w.source, w.line, w.dtype),  # another size
    lambda w: (w.role, w.module, w.source, w.line),
    lambda w: (w.role, w.module, w.source, w.dtype),
    lambda w: (w.role, w.source, w.line, w.shape),
    lambda w: (w.role, w.module, w.shape) if w.role == Role.OPTIMIZER_STATE else (id(w),),
)
"""By what one group took the place of another."""


def _pairs(old: _Remaining, new: _Remaining, key: _Key) -> Iterable[tuple[_Hashed, _Hashed, int]]:
    """Yield groups that are the same by ``key``, with how many of both there are."""
    then = old.by(key)
    for name, members in new.by(key).items():
        olds = then.get(name, ())
        counts = [
            sum(side.counts[one] for one in own) for side, own in ((old, olds), (new, members))
        ]
        if key in _SAME[-2:] and counts[0] != counts[1]:
            continue
        for one in members:
            for was in olds:
                number = min(old.counts.get(was, 0), new.counts.get(one, 0))
                if number:
                    yield was, one, number


def _replaced(
    old: _Remaining, new: _Remaining, key: _Key, least: int
) -> Iterable[tuple[_Hashed, _Hashed]]:
    """Yield groups of more than ``least`` bytes of which one took the other's place by ``key``.

    Of several, those of the same modules belong together, and what is then alone on both sides.
    """
    then = old.by(key, least)
    for name, members in new.by(key, least).items():
        olds = then.get(name, [])
        for numbers in {group.numbers for group in members}:
            was = [group for group in olds if group.numbers == numbers]
            now = [group for group in members if group.numbers == numbers]
            if len(was) == len(now) == 1:
                olds.remove(was[0])
                members.remove(now[0])
                yield was[0], now[0]
        if len(olds) == len(members) == 1:
            yield olds[0], members[0]


def _numbers(text: str) -> set[tuple[int, int]]:
    """Return the numbers of each star, and which star it is."""
    return {(star, one) for star, members in enumerate(read_numbers(text)) for one in members}


def _are_alike(was: _Hashed, now: _Hashed, there: Collection[tuple[str, tuple[int, int]]]) -> bool:
    """Tell whether groups may stand for each other: the same shape, or line and type, or a
    common dimension.
    """
    before, after = was.what.shape, now.what.shape
    own, module = _numbers(was.numbers), was.what.module
    are_others = module == now.what.module and own and own.isdisjoint(_numbers(now.numbers))
    if are_others and all((module, number) in there for number in own):
        return False  # which is of other modules, that are there as well
    is_same_type = was.what.dtype == now.what.dtype
    if before == after or (is_same_type and was.what.line == now.what.line):
        return True
    return len(before) == len(after) and (len(before) < 2 or any(map(eq, before, after)))
