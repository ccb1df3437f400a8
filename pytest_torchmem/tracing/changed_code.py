"""What of the code that a test leads to changed since a snapshot, what is likely meant first.

What makes an allocation is seldom what was changed: a failure shows the lines that changed.
"""

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import get_close_matches
from itertools import pairwise
from keyword import kwlist
from typing import NamedTuple

from pytest_torchmem.profile.facts import UNCHANGED, UNREACHED, CodeChange, CodeRow
from pytest_torchmem.tracing.code import NAME, Code, parts_of, texts_of
from pytest_torchmem.tracing.code_difference import (
    HEAD,
    OWN_WORD,
    WORD,
    Claims,
    FunctionDifference,
    Moved,
    Order,
    Row,
    letters_by_line,
    renamed_variables,
    rows_of_new,
    shortened,
    without_secrets,
)
from pytest_torchmem.tracing.sources import text_of

_VERY_ALIKE = 0.74
"""How alike lines of two functions are that are one line."""
_ALIKE = 0.5
"""The part of their lines that two functions share that are one with another name."""
_FEW_LINES = 3
"""Of a function that one line of another does not show to be that."""
_MOST_PAIRS = 10_000
"""Of functions that are compared for it."""
_AROUND = re.compile(r"\s*(@|(async )?with\b)")
_BEGINS = re.compile(r"\s*(@|(async )?def |class )")
_TEXTS = re.compile(r""""[^"]*"|'[^']*'|(?<=Namespace\().*|(?<=\bdict\().*""")
"""What names may stand in that no code has, the keys of a dictionary for example."""
_SETS_NAME = re.compile(r"^\s*(self\.\w+(?=\s*[:=](?!=))|\w+(?=\s*:\s*\S))")
_TEXT = re.compile(r"['\"]\W*(\w{3,}?)\W*['\"]")
_MAKES_GROW = {
    "-": re.compile(r"(?!append|extend|\w*hook|\w*copy|clone|register_|parameter|\w+_graph)"),
    "+": re.compile(r"(?!no_grad|inference_mode|detach)"),
    " ": re.compile(""),
}
"""By signs: the words that make memory grow where they are gone, or where they come."""

Versions = Callable[[str], Iterable[str]]
"""Yields the texts that a file of the program had."""


class Growth(NamedTuple):
    """What is known of a growth that code made."""

    near: Sequence[str] = ()
    """The lines that lead to it, those to blame first."""
    words: AbstractSet[str] = frozenset()
    """The names in its cause."""
    code: str = ""
    """A pattern of what code has that makes such a cause."""
    renamed: Mapping[str, str] = {}
    """Attributes that are modules, with what their names were."""
    switch: str = ""
    """The attribute with its class that is another one: what sets it is told if unchanged."""


_UNKNOWN = Growth()


def changed_code(
    before: Mapping[str, str],
    now: Code,
    growth: Growth = _UNKNOWN,
    versions: Versions = lambda file: (),
) -> list[CodeChange]:
    """Return the code that a snapshot has otherwise, what is most likely meant first.

    First come those with what makes such a cause and lines near the growth, then others in the
    order in which the test leads to them; lines with other names of variables alone are last.
    Modules, functions and classes of another name or in another file are no news; nor are imports
    beside what they serve. Where ``versions`` have the very lines of the snapshot, what stood there
    is told.
    """
    code = _Comparison(before, now, growth, versions)
    likely = _Likely(growth, now)
    found = list[tuple[tuple[int, ...], CodeChange]]()
    sides = ((name, code.changes(name), code.since(name)) for name in now)
    gone = ((name, [rows], "gone") for name, rows in code.gone())
    for name, changes, since in (*sides, *gone) if before else ():
        if since == UNREACHED and likely.levels[name] == likely.far:
            telling = ([one for one in rows if likely.meant.search(one.news)] for rows in changes)
            changes = [*filter(None, telling)] or [rows[:1] for rows in changes]
        for rows in changes:
            shown, says_little = _telling(rows, [likely.is_meant(name, one) for one in rows])
            keys = likely.keys(name, shown)
            found.append(((says_little, *min(keys)), _change(name, shown, keys, since)))
    if growth.renamed and not found:
        return changed_code(before, now, growth._replace(renamed={}), versions)
    found.sort(key=operator.itemgetter(0))
    told = [one for (says_little, *_), one in found if not says_little]
    return told or [one for _, one in found]


class _Comparison:
    """The code of a snapshot and that of now: which function was which, and what changed in it."""

    def __init__(
        self, before: Mapping[str, str], now: Code, growth: Growth, versions: Versions
    ) -> None:
        self._before, self._now, self._versions = before, now, versions
        self._names, self._switch = growth.renamed, growth.switch.rpartition(".")
        self._texts = texts_of(now)
        self._were = were = _counterparts(before, self._texts, now)
        self._former_names, self._new_names = _renamed_names(before, now, were, versions)
        self._named = {**growth.renamed, **_renamed(were)}
        self._moved = _moved(before, now, were)
        claims = _claims(before, now, were, self._moved, versions)
        for (name, _), (then, _) in claims.items():
            is_alike = name.endswith(": ") == then.endswith(": ") and len(now[name]) > _FEW_LINES
            if then not in were.values() and name not in were and is_alike:
                were[name] = then  # it is this one, written anew
        self._claims = {one: was for one, was in claims.items() if were.get(one[0]) != was[0]}

    def _was(self, name: str) -> str:
        return self._before.get(self._were.get(name, ""), "")

    def since(self, name: str) -> str:
        """Return since when there is a function, "" of one that the snapshot has."""
        if self._was(name) or 0 in self._now[name]:
            return ""
        return "new" if _is_new(name, self._before, self._versions) else UNREACHED

    def changes(self, name: str) -> list[list[Row]]:
        """Return the rows of each change in a function, also lines in whose texts others have the
        names that they had.
        """
        was, text, lines, found = self._was(name), self._texts[name], self._now[name], []
        if was != text and 0 in lines:  # it is a library
            said = f"{text} ({f'was {was}' if was else 'new'})"
            found = [[Row(Order.NEWS, said, CodeRow("+", 0, said))]]
        elif was != text and was and lines:
            then = [*_lines_then(self._were[name], was, self._versions).values()]
            sides = (self._former_names, self._new_names), renamed_variables(then, lines.values())
            # A parameter does not stand for a variable, and only that may be a field, too.
            anew = [
                {f"{of}{one}": "\0" for one in names for of in ("", "self.")}
                | dict.fromkeys(variables, "\1")
                for names, variables in zip(*sides, strict=True)
            ]
            own = FunctionDifference(
                name, was, lines, self._named, anew, then, self._moved, self._claims
            )
            found = [rows for rows in own.changes() if {one.row.sign for one in rows} - {" "}]
        elif was != text and lines:
            found = [rows_of_new(name, lines, self._moved[0], self._claims)]
        known = {*letters_by_line(was)}
        told = [*self._that_set_switch(name, known)]
        if (self._names or self._former_names) and 0 not in lines:
            told += _with_names(name, lines, self._names, self._former_names, known)
        if told:
            at_told = {one.row.number for one in told}
            rest = ([one for one in rows if one.row.number not in at_told] for rows in found)
            found = [*([one] for one in told), *filter(None, rest)]
        return found

    def _that_set_switch(self, name: str, known: AbstractSet[str]) -> Iterator[Row]:
        """Yield the ``known`` lines of a function that set the attribute which is another one."""
        kind, _, attribute = self._switch
        is_of_it = bool(kind) and name.rpartition(": ")[2].startswith(f"{kind}.")
        for number, line in self._now[name].items() if is_of_it else ():
            if line[:2] in known and _SETS_NAME.findall(line[2:]) == [f"self.{attribute}"]:
                shown = f"{line[2:].strip()}{UNCHANGED}"
                yield Row(Order.NEWS, line[2:], CodeRow("+", number, shown))

    def gone(self) -> Iterator[tuple[str, list[Row]]]:
        """Yield functions that are no longer there, with what of them no other one has."""
        elsewhere = {text for _, text in self._claims.values()}
        files = {name.partition(": ")[0] for name in self._now}
        fresh = (lines.values() for name, lines in self._now.items() if name not in self._were)
        new = {line[:2] for lines in fresh for line in lines}
        for name in sorted(self._before.keys() - {*self._were.values()}):
            was, (file, _, function) = self._before[name], name.partition(": ")
            text = text_of(os.path.abspath(file)) if file in files else ""
            is_gone = bool(text) and function not in parts_of(text)
            then = _lines_then(name, was, self._versions) if is_gone else {}
            every = zip(letters_by_line(was), then.items(), strict=bool(then))
            left = [one for letters, one in every if letters not in self._moved[1] | new]
            rows = [Row(Order.NEWS, text, CodeRow("-", at, text)) for at, text in left]
            rows = [one for one in rows if one.text.strip() not in elsewhere]
            rows = [one for one in rows if not (one.says_little or NAME.search(one.text))]
            if rows:
                yield name, rows


class _Likely:
    """What tells which changes are meant: how near to the growth they are, and what they say."""

    def __init__(self, growth: Growth, now: Code) -> None:
        self._at_near, self.far = _first_lines(growth.near, now), len(growth.near)
        self._words = growth.words
        every = (line[2:] for lines in now.values() for line in lines.values())
        self._read = Counter(word for line in every for word in WORD.findall(line))
        self.meant = re.compile(growth.code or "$^", re.IGNORECASE)
        self._words_meant = re.compile(rf"\w*(?:{growth.code or '$^'})\w*", re.IGNORECASE)
        self.levels = {
            name: min((self.level(name, one) for one in lines), default=self.far)
            for name, lines in now.items()
        }

    def is_meant(self, name: str, row: Row) -> bool:
        """Tell whether a row leads to the growth, or has what makes such a cause."""
        is_near = self.level(name, row.row.number) < self.far
        return is_near or bool(row.order is Order.MOVED and self.meant.search(row.news))

    def level(self, name: str, number: int) -> int:
        """Return how near the line of a function is, ``far`` of one that is not."""
        return self._at_near.get(f"{name.partition(': ')[0]}:{number}", self.far)

    def keys(self, name: str, rows: Sequence[Row]) -> list[tuple[int, ...]]:
        """Return what the rows of a change are sorted by; a word that is gone and came is none."""
        words = {sign: set[str]() for sign in "+- "}
        for row in rows:
            words[row.row.sign].update(self._meant_in(row.news))
        still = words["+"] & words["-"]
        return [self._key(name, row, still) for row in rows]

    def _key(self, name: str, row: Row, still: AbstractSet[str]) -> tuple[int, ...]:
        news, text = (
            any(_MAKES_GROW[row.row.sign].match(word) for word in words)
            for words in (self._meant_in(row.news) - still, self._meant_in(row.text))
        )
        is_other = text and bool(row.is_pair or row.note)  # what it is given, for example
        signs = 2 * news + text + (is_other and not news)
        level = self.level(name, row.row.number)
        signs += (level < self.far) + (level <= 1) + (level == 0)
        signs += row.is_setting
        is_other = self._words.isdisjoint(WORD.findall(row.text))
        sets = _SETS_NAME.match(row.text) if row.row.sign == "+" and not row.note else None
        is_unread = sets is not None and self._read[sets[1].removeprefix("self.")] < 2
        return row.order is Order.SAME or is_unread, -signs, row.order, is_other

    def _meant_in(self, text: str) -> set[str]:
        return {one[0].lower() for one in self._words_meant.finditer(text)}


def _telling(rows: Sequence[Row], are_meant: Sequence[bool]) -> tuple[list[Row], bool]:
    """Return the rows that are told, those to blame among them, and whether they say little."""
    told = [at for at, one in enumerate(rows) if one.row.sign != " " and not one.says_little]
    if not told:
        return [*rows], True
    best = min(rows[at].order for at in told)
    ranked = {at for at in told if rows[at].order == best or are_meant[at]}
    paired = {at for at, one in enumerate(rows) if one.is_pair and rows[at - 1].news == one.news}
    start, end = min(ranked), max(ranked) + 1
    start -= start in paired
    end += end < len(rows) and rows[end - 1].row.text.endswith(":")  # a block has its first line
    signs = "".join(one.row.sign for one in rows)
    if signs[end - 1] == "-" and not _AROUND.match(rows[end - 1].text):  # with what came for it
        end += len(signs[end:]) - len(signs[end:].lstrip("+"))
    noted = {at for at in paired if rows[at].note}  # which is shorter
    shown = (at for at in range(start, end) if at + 1 not in noted)
    return [rows[at]._replace(is_pair=rows[at].is_pair and at not in noted) for at in shown], False


def _change(
    name: str, rows: Sequence[Row], keys: Sequence[tuple[int, ...]], since: str
) -> CodeChange:
    """Return rows of a function as what changed; ``since`` says that it is new."""
    file, _, function = name.partition(": ")
    came = [at for at, one in enumerate(rows) if one.row.sign == "+"]
    least, own = min(keys), list[CodeRow]()
    best = [at for at, one in enumerate(keys) if one == least]
    best = [at for at in best if at in came] or best
    meant = best[0 if len(best) == len(keys) else len(best) // 2]
    likely = tuple(sorted((at for at in came if keys[at][1] < 0), key=keys.__getitem__))
    for before, one in pairwise((rows[0], *rows)):
        was = f"  # was: {shortened([before.row.text.strip()])}" if before.row.sign == "-" else ""
        text, note = (one.row.text, one.note or was) if one.is_pair else (one.text, "")
        own.append(one.row._replace(text=text, note=note))
    if since and function and (own[1:] or not NAME.search(own[0].text)):
        since = f"in {function.rpartition('.')[2]}, {since}"
    return CodeChange(file, tuple(own), meant, likely, since)


def _is_new(name: str, before: Mapping[str, str], versions: Versions) -> bool:
    """Tell whether a function was not there yet in the version of its file that a snapshot has."""
    file, _, function = name.partition(": ")
    own = {one: text for one, text in before.items() if one.startswith(f"{file}: ")}
    known = [*versions(os.path.abspath(file))]
    if not known:  # of a file that is not committed, where others are
        files = {name.partition(": ")[0] for name in before if ": " in name}
        return any(any(versions(os.path.abspath(one))) for one in files)
    for version in known if own else ():
        parts = parts_of(version)
        then = texts_of({f"{file}: {one}": lines for one, (_, lines) in parts.items()})
        if own.items() <= then.items():
            return function not in parts
    return False


def _first_lines(near: Sequence[str], now: Code) -> dict[str, int]:
    """Return the places where the statements of lines begin, with how near they are."""
    numbers, found = dict[str, list[int]](), dict[str, int]()
    for name, lines in now.items():
        numbers.setdefault(name.partition(": ")[0], []).extend(lines)
    for at, line in enumerate(near):
        file, _, number = line.rpartition(":")
        firsts = (one for one in numbers.get(file, ()) if one <= int(number))
        found.setdefault(f"{file}:{max(firsts, default=0)}", at)
    return found


def _counterparts(before: Mapping[str, str], texts: Mapping[str, str], now: Code) -> dict[str, str]:
    """Return by functions what they were: those of their name, or else what is gone and had all
    of their lines, or most of them.
    """
    found = {name: name for name in texts if name in before}
    gone = {text: name for name, text in before.items() if name not in texts}
    new = {name: text for name, text in texts.items() if name not in found and ": " in name}
    found |= {name: gone[text] for name, text in new.items() if text in gone}
    every = (line for lines in now.values() for line in lines.values())
    heads = {line[:2] for line in every if _BEGINS.match(line[2:])}
    counters = [(name, _counted(text, heads)) for text, name in gone.items()]
    for name, text in new.items() if len(new) * len(gone) < _MOST_PAIRS else ():
        own, best = _counted(text, heads), _ALIKE
        for former, lines in counters if name not in found else ():
            likeness = 2 * (own & lines).total() / max((own + lines).total(), 1)
            if likeness >= best and former.endswith(": ") == name.endswith(": "):
                found[name], best = former, likeness
    return found


def _counted(text: str, without: AbstractSet[str]) -> Counter[str]:
    """Return how often a function has each of its lines, but for those that many have."""
    return Counter(one for one in letters_by_line(text) if one not in without)


def _moved(before: Mapping[str, str], now: Code, were: Mapping[str, str]) -> Moved:
    """Return which lines functions lost and got, and who got decorators and ``with`` lines."""
    heirs, got, around = dict[str, set[str]](), set[str](), dict[str, str]()
    for name, lines in now.items():
        then = were.get(name, "")
        heirs.setdefault(then, set()).update(line[:2] for line in lines.values())
        known = {*letters_by_line(before.get(then, ""))}
        for line in (one for one in lines.values() if one[:2] not in known):
            if _AROUND.match(line[2:]):
                around[line[:2]] = name
            else:
                got.add(line[:2])
    lost = {
        letters: name
        for name, text in before.items()
        for letters in {*letters_by_line(text)} - heirs.get(name, set())
    }
    return lost, got, around


def _claims(
    before: Mapping[str, str], now: Code, were: Mapping[str, str], moved: Moved, versions: Versions
) -> Claims:
    """Return which lines came from another function and are others there."""
    (lost, got, _), left, found = moved, dict[str, str](), dict[tuple[str, int], tuple[str, str]]()
    for name in sorted({*lost.values()}):
        former = _lines_then(name, before[name], versions).values()
        lines = zip(letters_by_line(before[name]), former, strict=False)
        left |= {text.strip(): name for one, text in lines if one in lost and one not in got}
    fresh = dict[tuple[str, int], str]()
    for name, own in now.items():
        known = {*letters_by_line(before.get(were.get(name, ""), "")), *lost}
        new = {at: one[2:].strip() for at, one in own.items() if one[:2] not in known}
        new = {at: text for at, text in new.items() if not HEAD.match(text)}
        fresh |= {(name, at): without_secrets(text) for at, text in new.items()}
    if len(left) * len(fresh) > _MOST_PAIRS:
        return {}
    for is_own in (True, False):  # what is like a line of the same function is that
        for (name, number), text in fresh.items():
            of = [one for one in left if (were.get(name) == left[one]) is is_own]
            for like in get_close_matches(text, of, 1, _ALIKE if is_own else _VERY_ALIKE):
                then = left.pop(like)
                found |= {} if is_own else {(name, number): (then, like)}
    return found


def _renamed_names(
    before: Mapping[str, str], now: Code, were: Mapping[str, str], versions: Versions
) -> tuple[set[str], set[str]]:
    """Return the names that the code defined and no longer has, and those that it defines and had
    not; of Python's, whose texts may still say them.
    """
    then, there, words_then, words_now = set[str](), set[str](), set[str](), set[str]()
    for name, lines in now.items():
        if not name.partition(": ")[0].endswith(".py"):
            continue
        own = [_TEXTS.sub("", line[2:]) for line in lines.values()]
        words_now.update(*map(OWN_WORD.findall, own))
        was = before.get(were.get(name, ""), "")
        if was != "".join(line[:2] for line in lines.values()):
            lines_then = _lines_then(were.get(name, ""), was, versions)
            former = [_TEXTS.sub("", one) for one in lines_then.values()]
            words_then.update(*map(OWN_WORD.findall, former))
            then |= _defined(former)
            there |= _defined(own)
    gone = {word for word in then - words_now if word.removeprefix("self.")[2:]}
    return gone, there - words_then


def _defined(lines: Iterable[str]) -> set[str]:
    """Return the parameters, attributes and fields that lines define."""
    found = set[str]()
    for line in lines:
        is_head = HEAD.match(line.strip())
        found.update((OWN_WORD if is_head else _SETS_NAME).findall(line))
    return {one for one in found if not (one[0].isdecimal() or one in kwlist)}  # as defaults have


def _with_names(
    name: str,
    lines: Mapping[int, str],
    names: Mapping[str, str],
    gone: AbstractSet[str],
    known: AbstractSet[str],
) -> Iterator[Row]:
    """Yield the lines in whose texts modules or what is ``gone`` still have the names that they
    had, or with texts that modules' names have now and had not.
    """
    is_python = name.partition(": ")[0].endswith(".py")
    some = "|".join(map(re.escape, (*names.values(), *gone)))
    former = re.compile(rf"(?<!\w)({some})\b")
    for number, line in lines.items():
        texts = " ".join(_TEXTS.findall(line[2:])) if is_python else line[2:]
        told = [f"nothing is called {found} now" for found in former.findall(texts)]
        for text in _TEXT.findall(line[2:]):
            now = next((new for new, old in names.items() if text in new and text not in old), "")
            told += [f"which is in the name {now} now"] if now else []
        for note in told[:1]:
            told_with = f"{UNCHANGED}: {note}" if line[:2] in known else f"  # {note}"
            shown = f"{line[2:].strip()}{told_with}"
            yield Row(Order.NEWS, shown, CodeRow("+", number, shown))


def _renamed(were: Mapping[str, str]) -> dict[str, str]:
    """Return the former names of functions and classes that have another one."""
    found = dict[str, str]()
    for pair in were.items():
        parts = (one.rpartition(": ")[2].split(".")[::-1] for one in pair)
        found |= zip(*parts, strict=False)
    return {new: old for new, old in found.items() if new != old}


def _lines_then(name: str, was: str, versions: Versions) -> dict[int, str]:
    """Return the lines that a function had in the snapshot by the numbers that they had, none where
    no version has them.
    """
    file, _, function = name.partition(": ")
    for text in versions(os.path.abspath(file)) if was and file != name else ():
        _, lines = parts_of(text).get(function, ((), {}))
        if was == "".join(line[:2] for line in lines.values()):
            return {at: without_secrets(line[2:]) for at, line in lines.items()}
    return {}
