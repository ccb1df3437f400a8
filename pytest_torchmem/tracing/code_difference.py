"""How a function of the program differs from what it was: as a diff, without what is no news."""

import ast
import operator
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import SequenceMatcher
from enum import IntEnum
from functools import partial
from itertools import groupby
from textwrap import shorten
from typing import NamedTuple

from pytest_torchmem.printable import counted, listed
from pytest_torchmem.profile.facts import CodeRow
from pytest_torchmem.tracing.code import NAME, letters_of

_LONGEST = 160
"""Characters of lines that are gone."""
_ALIKE = 0.6
"""How alike a line is to one that it was."""
_MOST_PAIRS = 2_500
"""Of lines that are compared for it."""
_CAME, STOOD = "  # came: ", "  # stood "
WORD = re.compile(r"\w+")
_NO_ATTRIBUTE = re.compile(r"(?<![\w.])\w+")
OWN_WORD = re.compile(r"(?:self\.)?\w+")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|\d[\d._]*e[+-]?\d+|[\w.]+""")
_NAMED = re.compile(r"\s*(\w+=\s*)+")
"""What arguments have that are given by their names now."""
_SETS = re.compile(r"self\.(\w+) = (\w+\.)*\1$|raise\b")
"""What passes an argument on, or refuses it."""
_PATH = re.compile(r"\b(?:\w+\.)+(?=\w)")
_PARAMETER = re.compile(r"[(,]\s*(\w+)")
_DEFAULT = re.compile(r"\w+[^=,()]*=(?:\([^)]*\)|[^,()])+")
HEAD = re.compile(r"(async )?def |class ")
_SETS_VARIABLE = re.compile(r"(?:^\s*|\bfor |, )(\w+)(?=, \w+(?: =|, | in )| = | in )")
_ASSIGNMENT_TO = re.compile(r"\s*([\w., ]+) = ")
_ASSIGNMENT = re.compile(r"(\w+) = (.+)")
_SAYS_LITTLE = re.compile(
    r"^(from|import)\b|^\W*$| \(new\)$|^\w*(print|log(ger|ging)?(\.\w+)?|warn(ings\.warn)?)\("
)
"""Lines of code that import or print, and new libraries, which say little beside others."""
_SECRET = re.compile(
    r"""(?i)((?:token|secret|passw\w*|key|credentials?)["']?\s*[:=]\s*)"""
    r"""["']?(?=[\w\-+/.]*\d)[\w\-+/.]{20,}(?![\w(])["']?"""
)


class Order(IntEnum):
    """How likely a changed line is meant, if no more is known of it."""

    NEWS = 0
    MOVED = 1
    """It is there from another function, takes other arguments, with no other defaults, passes one
    on, or reads something where it stands now.
    """
    SAME = 2
    """Variables alone have other names, or what was computed in a line has one now."""


class Row(NamedTuple):
    """A line that came, or is gone."""

    order: Order
    news: str
    """What of it differs."""
    row: CodeRow
    note: str = ""
    """What it was, or where it comes from."""
    is_pair: bool = False
    """The one that is gone before it says so, too."""

    @property
    def text(self) -> str:
        return self.row.text + self.note

    @property
    def is_setting(self) -> bool:
        """Whether numbers or texts of a line are others."""
        return bool(self.note or self.is_pair) and bool(_constants(self.news))

    @property
    def says_little(self) -> bool:
        return bool(_SAYS_LITTLE.search(self.row.text.strip()))


Claims = Mapping[tuple[str, int], tuple[str, str]]
"""By functions and numbers the lines that are like one that another function lost: it, and that."""


Moved = tuple[Mapping[str, str], AbstractSet[str], Mapping[str, str]]
"""The functions that lost lines, by the letters of these; the letters of lines that any got; the
functions that got decorators and ``with`` lines, which do not count as moved, by their letters."""


class _Part(NamedTuple):
    """Lines that follow each other: where they stood, and where those are that stand there now."""

    is_equal: bool
    then: range
    now: range


class FunctionDifference:
    """The lines of a function then and now, with new names of others undone: then as letters, and
    as text (``former``) where a version of the file has them.
    """

    def __init__(
        self,
        name: str,
        was: str,
        lines: Mapping[int, str],
        names: Mapping[str, str],
        anew: Sequence[Mapping[str, str]],
        former: Sequence[str],
        moved: Moved,
        claims: Claims,
    ) -> None:
        self._name, self._former, self._moved, self._claims = name, former, moved, claims
        self._numbers, self._letters = [*lines], [line[:2] for line in lines.values()]
        self._now = [without_secrets(line[2:]) for line in lines.values()]
        # Where the texts are known, what only stands in another block is the same line.
        key_of = partial(NAME.sub, "") if former else letters_of
        then = self._keys_then = [*map(key_of, without_names(former, anew[0]))] or letters_by_line(
            was
        )
        as_named = partial(WORD.sub, lambda word: names.get(word[0], word[0]))
        own = [one.strip() for one in self._now] if former else self._now
        every = zip(map(as_named, own), without_names(own, anew[1]), own, strict=True)
        keys = ([*map(key_of, one)] for one in every)
        self._keys = [next((one for one in own if one in then), own[-1]) for own in keys]
        self._as_before = _as_before([one.strip() for one in former], own, *anew)
        self._defaults = _new_defaults(former, self._now)
        matched = SequenceMatcher(None, then, self._keys, autojunk=False).get_opcodes()
        self._parts = [*self._by_block(matched)]
        changed = [one for one in self._parts if not one.is_equal]
        self._stood = {then[at]: part for part in changed for at in part.then}
        came = [at for part in changed for at in part.now]
        kept, elsewhere = {self._keys[at] for at in came}, {text for _, text in claims.values()}
        gone = (at for part in changed for at in part.then if then[at] not in kept)
        gone = (at for at in gone if was[2 * at : 2 * at + 2] not in moved[1])
        self._gone = {at for at in gone if not former or former[at].strip() not in elsewhere}
        new = [at for at in came if self._keys[at] not in self._stood]
        within = "\n".join(self._now[at] for at in new)
        self._gone -= {at for at in self._gone if former and _is_argument(former[at], within)}
        fresh = {at: self._now[at].strip() for at in new if self._letters[at] not in self._moved[0]}
        self._pairs = _pairs({at: former[at].strip() for at in self._gone if former}, fresh)

    def _by_block(self, matched: Iterable[tuple[str, int, int, int, int]]) -> Iterator[_Part]:
        """Yield the parts; equal lines that came into a block or out of one are others, unless
        what begins that block came or went before them.
        """
        former, begins = self._former, False
        of_all = _indent(self._now[0]) - _indent(former[0]) if former else 0
        for tag, start, stop, first, last in matched:
            if tag != "equal" or not former:
                yield _Part(tag == "equal", range(start, stop), range(first, last))
                own = (*former[start:stop], *self._now[first:last])
                begins = any(one.endswith(":") for one in own)
                continue
            at, by = start, first - start
            shifts = (_indent(self._now[n + by]) - _indent(former[n]) for n in range(start, stop))
            for shift, run in groupby(shifts):
                end = at + len([*run])
                is_equal = shift == of_all or (begins and at == start)
                yield _Part(is_equal, range(at, end), range(at + by, end + by))
                at = end
            begins = False

    def changes(self) -> Iterator[list[Row]]:
        """Yield the rows of what changed; parts that one line separates are together, and the
        first line of a block with what begins it.
        """
        group, parts = list[_Part](), self._parts
        for at, part in enumerate(parts):
            is_between = len(part.now) == 1 and bool(group) and at + 1 < len(parts)
            if not part.is_equal or is_between:
                group.append(part)
            elif group:
                yield [*self._rows(group), self._between(part)]
                group = []
        if group:
            yield [*self._rows(group)]

    def _rows(self, group: Sequence[_Part]) -> Iterator[Row]:
        """Yield the rows of parts, what is gone before what came for it."""
        changed = [part for part in group if not part.is_equal]
        passed = {
            at
            for part in changed
            for at in part.then
            if any(self._keys[one] == self._keys_then[at] for each in changed for one in each.now)
        }
        gone = self._gone if self._former else self._gone | passed  # where they stood is told
        for part in group:
            if part.is_equal:
                yield self._between(part)
                continue
            heads = (at for at in part.then if at in gone and self._former)
            bodies = {at + 1 for at in heads if self._former[at].endswith(":")}
            left = [at for at in part.then if at in gone or at in bodies]
            ends = [end if (end := self._pairs.get(at, -1)) in part.then else -1 for at in part.now]
            for at, end in zip(part.now, ends, strict=True):
                row, until = self._new(at, group), end if max(ends) >= 0 else part.then.stop
                ends[at - part.now.start] = -1
                if row.row.text.endswith(":"):  # nothing stands between a block and its head
                    until = max(until, *ends[at - part.now.start :][:2])
                for one in (one for one in left if one <= until and self._former):
                    yield self._of_gone(at, self._former[one], row if one == end else None)
                left = [one for one in left if one > until]
                yield row
            if self._former:
                for one in left:
                    yield self._of_gone(part.now.stop, self._former[one])
            elif left and not part.now:
                yield self._of_gone(part.now.stop, f"{counted(len(left), 'line')} of before")

    def _between(self, part: _Part) -> Row:
        """Return the row of a line that stayed, but for names in it that are others."""
        at, text = part.now.start, self._now[part.now.start]
        was = self._former[part.then.start].strip() if self._former else text.strip()
        if was == text.strip():
            return Row(Order.SAME, "", CodeRow(" ", self._numbers[at], text))
        note = _difference(was, text.strip())[0] or f"  # was: {shortened([was])}"
        return Row(Order.SAME, "", CodeRow("+", self._numbers[at], text), note)

    def _of_gone(self, at: int, text: str, pair: Row | None = None) -> Row:
        row = CodeRow("-", self._numbers[min(at, len(self._numbers) - 1)], text)
        if pair is not None:
            return Row(pair.order, pair.news, row)
        heir = self._moved[2].get(letters_of(text), "").rpartition(": ")[2]
        note = f"  # {heir} has it now" if heir else ""
        return Row(Order.SAME if text.strip() in self._as_before else Order.NEWS, text, row, note)

    def _new(self, at: int, group: Sequence[_Part]) -> Row:
        """Return the row of a line that came, with what is known of where it comes from."""
        number, text = self._numbers[at], self._now[at].strip()
        order, news, note, was = Order.NEWS, text, "", ""
        pair, stood = self._pairs.get(at), self._stood.get(self._keys[at])
        then = range(group[0].then.start, group[-1].then.stop)
        if stood is not None and (self._former or stood not in group):
            note = self._passed(at, stood)
        elif stood is None and self._letters[at] in self._moved[0]:
            order, note = Order.MOVED, _from(self._moved[0][self._letters[at]])
        elif pair is not None:
            was = self._former[pair].strip()
            note, news = _difference(was, text)
            if pair not in then:  # it passed what did not change
                before = pair < then.start
                passed = self._former[then.start - 1 if before else then.stop].strip()
                note = note or f"  # was: {shortened([was])}"
                note += f"; stood {'before' if before else 'after'}: {passed}"
                news += passed
            is_head = HEAD.match(text) and {*_DEFAULT.findall(was)} <= {*_DEFAULT.findall(text)}
            names = [_PARAMETER.findall(one) for one in (was, text)]
            if is_head and names[1][: len(names[0])] != names[0]:
                is_head, note = None, f"{note}, before others" if note else ""
            sides = (_PATH.sub("", one) for one in (was, text))
            if is_head or text.endswith(f" = {was}") or operator.eq(*sides):
                order = Order.MOVED
        elif claim := self._claims.get((self._name, number)):
            order, news, note = _from_another(claim, text)
        alike = [self._keys_then[one][0] for one in then if not (self._former or stood)]
        is_same = self._keys[at][0] in alike or text in self._as_before
        if is_same or _NAMED.fullmatch(news):
            order = Order.SAME
        elif _SETS.match(text):
            order = max(order, Order.MOVED)
        is_pair, given = pair in then, [one for one in WORD.findall(text) if one in self._defaults]
        is_body = given and not HEAD.match(text)
        if order is Order.NEWS and is_body and not note:  # what it is where no call says so
            is_pair, note = False, f"  # by default {self._defaults.pop(given[0])}"
        return Row(order, news, CodeRow("+", number, self._now[at]), note, is_pair)

    def _passed(self, at: int, stood: _Part) -> str:
        """Return in words which line one passed, "" if it is in the place of others there."""
        was = next(one for one in stood.then if self._keys_then[one] == self._keys[at])
        is_later = stood.now.start < at
        over = self._now[max(0, (at if is_later else stood.now.start) - 1)]
        if self._former:
            beside = was + 1 if is_later else was - 1
            if at in stood.now or not 0 <= beside < len(self._former):
                return ""
            over = self._former[beside]
        return f"{STOOD}{'before' if is_later else 'after'}: {over.strip()}"


def rows_of_new(
    name: str, lines: Mapping[int, str], lost: Mapping[str, str], claims: Claims
) -> list[Row]:
    """Return the rows of a new function, the head first; those that other functions ``lost`` are
    no news.
    """
    shown = {number: without_secrets(line[2:]) for number, line in lines.items()}
    telling = [number for number, text in shown.items() if not _SAYS_LITTLE.search(text.strip())]
    head = next((one for one in telling if NAME.search(shown[one])), [*telling, *lines][0])
    found = list[Row]()
    for number, text in shown.items():
        order, note, news = Order.NEWS, "", text.strip()
        if number <= head:
            order = Order.MOVED
        elif (was := lost.get(lines[number][:2])) is not None:
            order, note = Order.MOVED, _from(was)
        elif (name, number) in claims:
            order, news, note = _from_another(claims[name, number], text.strip())
        found.append(Row(order, news, CodeRow("+", number, text), note))
    return found


def _as_before(
    then: Sequence[str], now: Sequence[str], gone: Container[str], new: Container[str]
) -> set[str]:
    """Return the lines that compute what others did before variables were ``gone`` or ``new``, and
    those that set these.
    """
    sides = ((now, new, then), (then, gone, now)) if then else ()
    found = set[str]()
    for own, names, others in sides:
        pairs = (one for line in own if (one := _ASSIGNMENT.fullmatch(line)))
        every = "\n".join(others)
        pairs = (one for one in pairs if re.search(rf"(?<![\w.]){re.escape(one[2])}(?!\w)", every))
        values = {one[1]: one[2] for one in pairs if one[1] in names}
        found |= {f"{name} = {value}" for name, value in values.items()}
        for line in own:
            whole = "".join(values.get(one, one) for one in re.split(r"(\w+)", line))
            found |= {whole, line} if whole != line and whole in others else set()
    return found


def _new_defaults(then: Sequence[str], now: Sequence[str]) -> dict[str, str]:
    """Return by their names the parameters with defaults that a function has and had not."""
    was, own = ("".join(one for one in side if HEAD.match(one.strip())) for side in (then, now))
    known = {*WORD.findall(was)} if then else {*WORD.findall(own)}
    given = {WORD.findall(one)[0]: one.strip() for one in _DEFAULT.findall(own)}
    known |= {name for line in now for name in _SETS_VARIABLE.findall(line)}  # which it sets itself
    return {name: one for name, one in given.items() if name not in known}


def renamed_variables(then: Sequence[str], lines: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the variables that a function sets no longer and nowhere has, and those it had not."""
    sides = then, [line[2:] for line in lines]
    words = [{word for line in own for word in _NO_ATTRIBUTE.findall(line)} for own in sides]
    names = [{word for line in own for word in _SETS_VARIABLE.findall(line)} for own in sides]
    return names[0] - words[1], names[1] - words[0]


def without_names(lines: Iterable[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield lines with signs for names that have others on the other side."""
    for line in lines:
        yield OWN_WORD.sub(lambda word: names.get(word[0], word[0]), line.strip())


def _from(name: str) -> str:
    return f"  # from {name.rpartition(': ')[2] or 'another file'}"


def _from_another(was: tuple[str, str], text: str) -> tuple[Order, str, str]:
    """Return what differs from a line of another function, and in words what it was there."""
    name, then = was
    if then == text:
        return Order.MOVED, text, _from(name)
    note, news = _difference(then, text)
    note = note or f"  # was: {shortened([then])}"
    where = name.rpartition(": ")[2].rpartition(".")[2] or "no function"
    return Order.NEWS, news, f"{note}, in {where}"


def _is_argument(line: str, text: str) -> bool:
    """Tell whether a line that is an argument of a longer statement is one of another in a text."""
    own = line.strip().removesuffix(",")
    argument = rf"[(\[{{,]\s*{re.escape(own)}\s*[,)\]}}]"
    return "=" in own and own in text and re.search(argument, text) is not None


def _pairs(gone: Mapping[int, str], came: Mapping[int, str]) -> dict[int, int]:
    """Return by positions of new lines those of the former ones that set the same, or else that
    they are most like.
    """
    alike, found = list[tuple[bool, float, int, int]](), dict[int, int]()
    are_few = len(gone) * len(came) <= _MOST_PAIRS
    targets = {at: target_of(text) for at, text in gone.items()}
    for at, text in came.items():
        matched, target = SequenceMatcher(b=text), target_of(text)
        for was, then in gone.items():
            is_other = not target or targets[was] != target
            if is_other and not are_few:
                continue
            matched.set_seq1(then)
            quick = matched.real_quick_ratio, matched.quick_ratio, matched.ratio
            if not is_other or all(ratio() >= _ALIKE for ratio in quick):
                alike.append((is_other, -matched.ratio(), at, was))
    for *_, at, was in sorted(alike):
        if at not in found and was not in found.values():
            found[at] = was
    return found


def target_of(line: str) -> str:
    """Return what a line sets, "" for one that sets nothing."""
    found = _ASSIGNMENT_TO.match(line)
    return found[1] if found else ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _difference(was: str, now: str) -> tuple[str, str]:
    """Return in words what of a line was otherwise, "" where that is best read in full, and all
    that differs.
    """
    then, there = (re.findall(rf"{_VALUE.pattern}|\W", one) for one in (was, now))
    matched = SequenceMatcher(None, then, there, autojunk=False).get_opcodes()
    changes = [one for one in matched if one[0] != "equal"]
    gone = ["".join(then[start:stop]).strip(" ,") for _, start, stop, *_ in changes]
    came = ["".join(there[first:last]).strip(" ,") for *_, first, last in changes]
    note, named = "", [_named_value(then, start, stop) for _, start, stop, *_ in changes]
    are_values = all(map(_VALUE.fullmatch, (*gone, *came)))
    are_constants = [*map(_constants, gone)] == [[one] for one in gone]
    if not any(gone) and any(came) and all(map(_is_whole, came)):
        note = f"{_CAME}{listed([*filter(None, came)])}"
    elif gone and are_values and (are_constants or len(gone) == 1):
        note = f"  # was: {listed(named, len(named)) if named[1:] else gone[0]}"
    return note, " ".join((*named, *came))


def _constants(text: str) -> list[str]:
    """Return the numbers and texts of a line, which are none of its names."""
    return [one for one in _VALUE.findall(text) if not (one[0].isalpha() or one[0] in "_.")]


def _named_value(tokens: Sequence[str], start: int, stop: int) -> str:
    """Return a value of a line with the name that it is given there."""
    at = start
    while at and tokens[at - 1] in " :=":
        at -= 1
    first = at - 1 if 0 < at < start and _VALUE.fullmatch(tokens[at - 1]) else start
    return "".join(tokens[first:stop])


def _is_whole(text: str) -> bool:
    """Tell whether a piece of a line is understood alone: arguments, or what follows a name."""
    try:
        return bool(ast.parse(f"_{text}" if text.startswith(".") else f"_({text})"))
    except SyntaxError:
        return False


def shortened(lines: Iterable[str]) -> str:
    """Return lines as one text that is not too long."""
    return shorten("; ".join(lines), _LONGEST, placeholder=" …")


def without_secrets(line: str) -> str:
    """Return a line without what a configuration may hold, and no report is to show."""
    return _SECRET.sub(r"\1…", line)


def letters_by_line(text: str) -> list[str]:
    """Return the letters of each line, as a snapshot has them."""
    return re.findall("..", text)
