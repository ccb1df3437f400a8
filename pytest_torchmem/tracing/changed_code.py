"""What of the code that a test leads to changed since a snapshot, what is likely meant first.

What makes an allocation is seldom what was changed: a failure shows the lines that changed.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from difflib import SequenceMatcher, get_close_matches
from enum import IntEnum
from functools import partial
from keyword import kwlist
from textwrap import shorten
from typing import NamedTuple

from pytest_torchmem.printable import counted, listed
from pytest_torchmem.profile.facts import UNREACHED, CodeLine
from pytest_torchmem.tracing.code import NAME, Code, letters_of, parts_of, texts_of

_LONGEST = 160
"""Characters of lines that are gone."""
_VERY_ALIKE = 0.7
"""How alike lines of two functions are that are one line."""
_ALIKE = 0.5
"""The part of their lines that two functions share that are one with another name."""
_FEW_LINES = 3
"""Of a function that one line of another does not show to be that."""
_MOST_PAIRS = 10_000
"""Of functions that are compared for it."""
_AT_A_TIME = 2
"""Lines of a function that come before those of the next."""
_CAME, _STOOD = "  # came: ", "  # stood "
_WORD = re.compile(r"\w+")
_OWN_WORD = re.compile(r"(?:self\.)?\w+")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|\d[\d._]*e[+-]?\d+|[\w.]+""")
_NAMED = re.compile(r"\s*(\w+=\s*)+")
"""What arguments have that are given by their names now."""
_SETS = re.compile(r"self\.(\w+) = \1$|raise\b")
"""What passes an argument on, or refuses it."""
_AROUND = re.compile(r"\s*(@|(async )?with\b)")
_HEAD = re.compile(r"(async )?def |class ")
_BEGINS = re.compile(r"\s*(@|(async )?def |class )")
_DEFAULT = re.compile(r"\w+\s*=[^,)]+")
_TEXTS = re.compile(r""""[^"]*"|'[^']*'|(?<=Namespace\().*|(?<=\bdict\().*""")
"""What names may stand in that no code has, the keys of a dictionary for example."""
_SETS_NAME = re.compile(r"^\s*(self\.\w+(?=\s*[:=](?!=))|\w+(?=\s*:\s*\S))")
_TEXT = re.compile(r"['\"]\W*(\w{3,}?)\W*['\"]")
_SAYS_LITTLE = re.compile(r"^(from|import)\b|^\W*$|\(new\)$")
"""Lines of code, and new libraries, that say little beside others."""
_SECRET = re.compile(
    r"""(?i)((?:token|secret|passw\w*|key|credentials?)["']?\s*[:=]\s*)"""
    r"""["']?(?=[\w\-+/.]*\d)[\w\-+/.]{20,}(?![\w(])["']?"""
)
"""What a configuration may hold, and no report is to show."""

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


_UNKNOWN = Growth()


class _Order(IntEnum):
    """How likely a changed line is meant, if no more is known of it."""

    NEWS = 0
    MOVED = 1
    """It is there from another function, takes other arguments, with no other defaults, or passes
    one on.
    """
    SAME = 2
    """Variables alone have other names."""


class _Change(NamedTuple):
    order: _Order
    news: str
    """What of the line differs, or is gone."""
    line: CodeLine


def changed_lines(
    before: Mapping[str, str],
    now: Code,
    growth: Growth = _UNKNOWN,
    versions: Versions = lambda file: (),
) -> list[CodeLine]:
    """Return the lines of code that a snapshot has otherwise, those most likely meant first.

    First come those with what makes such a cause, or a word of it, then functions with lines near
    the growth, in their order, then others of their classes and files, a few lines of each at a
    time; new functions elsewhere and lines with other names of variables alone are last. Modules,
    functions and classes of another name or in another file are no news; nor are imports beside
    what they serve. Where ``versions`` have the very lines of the snapshot, what stood there is
    told.
    """
    near, words, code, names = growth
    texts, at_near = texts_of(now), _first_lines(near, now)
    were = _counterparts(before, texts, now)
    former_names, new_names = _renamed_names(before, now, were, versions)
    named = {**names, **_renamed(were)}
    meant, said_words = re.compile(code or "$^", re.IGNORECASE), _said(" ".join(words))
    moved = _moved(before, now, were)
    claims = _claims(before, now, were, moved, versions)
    for (name, _), (then, _) in claims.items():
        is_alike = name.endswith(": ") == then.endswith(": ") and len(now[name]) > _FEW_LINES
        if then not in were.values() and name not in were and is_alike:
            were[name] = then  # it is this one, written anew
    claims = {one: was for one, was in claims.items() if were.get(one[0]) != was[0]}
    levels = dict[str, int]()
    for name, lines in now.items():
        places = (f"{name.partition(': ')[0]}:{number}" for number in lines)
        levels[name] = min((at_near[one] for one in places if one in at_near), default=len(near))
    around = {_around(name) for name, level in levels.items() if level < len(near)}
    others = {name for name, text in texts.items() if text != before.get(were.get(name, ""))}
    levels |= _of_called(now, others, levels, len(near))
    found = list[tuple[tuple[int, ...], CodeLine]]()
    for name, level in levels.items() if before else ():
        then, is_far = were.get(name, ""), level == len(near)
        was = before.get(then, "")
        function = level, _around(name) not in around, name.endswith(": ")
        changes = list[_Change]()
        if was != texts[name] and 0 in now[name]:  # it is a library
            said = f"{texts[name]} ({f'was {was}' if was else 'new'})"
            changes = [_Change(_Order.NEWS, said, CodeLine(name, 0, said))]
        elif was != texts[name] and was:
            lines_then = _lines_then(then, was, versions)
            changes = _changes(name, was, now[name], named, lines_then, moved, claims)
            anew = _anew(lines_then, now[name], former_names, new_names)
            changes = [
                one._replace(order=_Order.SAME) if one.line.number in anew else one
                for one in changes
            ]
        elif was != texts[name]:
            is_new = _is_new(name, before, versions)
            changes = _of_new(name, now[name], moved[0], claims, is_new)
            if is_far:
                changes = [one for one in changes if meant.search(one.news)] or changes[:1]
        if (names or former_names) and 0 not in now[name]:
            told = [*_with_names(name, now[name], names, former_names, {*_split(was)})]
            at_told = {one.line.place for one in told}
            changes = [*told, *(one for one in changes if one.line.place not in at_told)]
        changes.sort(
            key=lambda one: (at_near.get(one.line.place, len(near)), _STOOD in one.line.text)
        )
        for at, (order, news, line) in enumerate(changes):
            is_other = words.isdisjoint(_WORD.findall(line.text))
            same = said_words & _said(news)  # a number of a shape is no chance
            signs = 2 * bool(meant.search(news)) + bool(meant.search(line.text))
            signs += (line.place in at_near) + bool(same) + any(map(str.isdecimal, same))
            moved_by = _Order.NEWS if same and order is _Order.MOVED else order
            likely = order is _Order.SAME, -signs, moved_by, is_other
            found.append(((*likely, is_far and not was, at // _AT_A_TIME, *function), line))
    ordered = [line for _, line in sorted(found, key=operator.itemgetter(0))]
    if names and not ordered:
        return changed_lines(before, now, growth._replace(renamed={}), versions)
    bare = ((line, line.text.partition("  # ")[0]) for line in ordered)
    return [line for line, text in bare if not _SAYS_LITTLE.search(text)] or ordered


def _said(text: str) -> set[str]:
    """Return the words and numbers of a text, as it does not matter how they are written."""
    words = (word for word in _WORD.findall(text) if word[2:])
    return {word.replace("_", "").lower() for word in words if word.title() not in kwlist}


def _of_called(
    now: Code, changed: Collection[str], levels: Mapping[str, int], far: int
) -> dict[str, int]:
    """Return how near functions are that functions near the growth name."""
    found = dict[str, int]()
    for name, level in levels.items():
        words = {word for line in now[name].values() for word in _WORD.findall(line[2:])}
        for one in changed if level < far else ():
            called = [word for word in _WORD.findall(one) if not word.startswith("__")]
            if called[-1] in words and levels[one] == far:
                found[one] = min(level, found.get(one, far))
    return found


def _is_new(name: str, before: Mapping[str, str], versions: Versions) -> bool:
    """Tell whether a function was not there yet in the version of its file that a snapshot has."""
    file, _, function = name.partition(": ")
    own = {one: text for one, text in before.items() if one.startswith(f"{file}: ")}
    for version in versions(os.path.abspath(file)) if own else ():
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
    return Counter(one for one in _split(text) if one not in without)


def _moved(
    before: Mapping[str, str], now: Code, were: Mapping[str, str]
) -> tuple[dict[str, str], set[str]]:
    """Return the letters of lines that functions lost, with these, and of those that any got; what
    begins a block or decorates a function is no line that moves.
    """
    heirs, got = dict[str, set[str]](), set[str]()
    for name, lines in now.items():
        then = were.get(name, "")
        heirs.setdefault(then, set()).update(line[:2] for line in lines.values())
        moving = (one for one in lines.values() if not _AROUND.match(one[2:]))
        got |= {line[:2] for line in moving}.difference(_split(before.get(then, "")))
    lost = {
        letters: name
        for name, text in before.items()
        for letters in {*_split(text)} - heirs.get(name, set())
    }
    return lost, got


_Claims = Mapping[tuple[str, int], tuple[str, str]]
"""By functions and numbers the lines that are like one that another function lost: it, and that."""


def _claims(
    before: Mapping[str, str],
    now: Code,
    were: Mapping[str, str],
    moved: tuple[Mapping[str, str], AbstractSet[str]],
    versions: Versions,
) -> _Claims:
    """Return which lines came from another function and are others there."""
    (lost, got), left, found = moved, dict[str, str](), dict[tuple[str, int], tuple[str, str]]()
    for name in sorted({*lost.values()}):
        lines = zip(_split(before[name]), _lines_then(name, before[name], versions), strict=False)
        left |= {text.strip(): name for one, text in lines if one in lost and one not in got}
    fresh = dict[tuple[str, int], str]()
    for name, own in now.items():
        known = {*_split(before.get(were.get(name, ""), "")), *lost}
        new = ((number, _shown(one[2:])) for number, one in own.items() if one[:2] not in known)
        fresh |= {(name, number): text for number, text in new if not _HEAD.match(text)}
    if len(left) * len(fresh) > _MOST_PAIRS:
        return {}
    for is_own in (True, False):  # what is like a line of the same function is that
        for (name, number), text in fresh.items():
            of = [one for one in left if (were.get(name) == left[one]) is is_own]
            for like in get_close_matches(text, of, 1, _ALIKE if is_own else _VERY_ALIKE):
                then = left.pop(like)
                found |= {} if is_own else {(name, number): (then, like)}
    return found


def _split(text: str) -> list[str]:
    """Return the letters of each line, as a snapshot has them."""
    return re.findall("..", text)


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
        words_now.update(*map(_OWN_WORD.findall, own))
        was = before.get(were.get(name, ""), "")
        if was != "".join(line[:2] for line in lines.values()):
            lines_then = _lines_then(were.get(name, ""), was, versions)
            former = [_TEXTS.sub("", one) for one in lines_then]
            words_then.update(*map(_OWN_WORD.findall, former))
            then |= _defined(former)
            there |= _defined(own)
    gone = {word for word in then - words_now if word.removeprefix("self.")[2:]}
    return gone, there - words_then


def _defined(lines: Iterable[str]) -> set[str]:
    """Return the parameters, attributes and fields that lines define."""
    found = set[str]()
    for line in lines:
        is_head = _HEAD.match(line.strip())
        found.update((_OWN_WORD if is_head else _SETS_NAME).findall(line))
    return found


def _anew(
    former: Sequence[str], lines: Mapping[int, str], gone: AbstractSet[str], new: AbstractSet[str]
) -> set[int]:
    """Return the lines that only have new names of what has another one."""
    undone = [*_without(former, gone)]
    shown = zip(lines, _without((line[2:] for line in lines.values()), new), strict=True)
    return {number for number, text in shown if "\0" in text and text in undone}


def _without(lines: Iterable[str], names: AbstractSet[str]) -> Iterator[str]:
    """Yield lines with one sign for each of the names."""
    own = names | {f"self.{one}" for one in names}  # a field of a class
    for line in lines:
        yield _OWN_WORD.sub(lambda word: "\0" if word[0] in own else word[0], line.strip())


def _with_names(
    name: str,
    lines: Mapping[int, str],
    names: Mapping[str, str],
    gone: AbstractSet[str],
    known: AbstractSet[str],
) -> Iterator[_Change]:
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
            shown = f"{line[2:].strip()}  # {'unchanged: ' * (line[:2] in known)}{note}"
            yield _Change(_Order.NEWS, shown, CodeLine(name.partition(": ")[0], number, shown))


def _renamed(were: Mapping[str, str]) -> dict[str, str]:
    """Return the former names of functions and classes that have another one."""
    found = dict[str, str]()
    for pair in were.items():
        parts = (one.rpartition(": ")[2].split(".")[::-1] for one in pair)
        found |= zip(*parts, strict=False)
    return {new: old for new, old in found.items() if new != old}


def _lines_then(name: str, was: str, versions: Versions) -> list[str]:
    """Return the lines that a function had in the snapshot, none where no version has them."""
    file, _, function = name.partition(": ")
    for text in versions(os.path.abspath(file)) if was and file != name else ():
        _, lines = parts_of(text).get(function, ((), {}))
        if was == "".join(line[:2] for line in lines.values()):
            return [_SECRET.sub(r"\1…", line[2:]) for line in lines.values()]
    return []


def _changes(
    name: str,
    was: str,
    lines: Mapping[int, str],
    names: Mapping[str, str],
    former: Sequence[str],
    moved: tuple[Mapping[str, str], AbstractSet[str]],
    claims: _Claims,
) -> list[_Change]:
    """Return the lines of a function that changed, with new names of others undone; with the
    ``former`` ones, if these are known, and those that ``moved`` between functions.
    """
    elsewhere = {text for _, text in claims.values()}
    file = name.partition(": ")[0]
    shown = {number: _shown(line[2:]) for number, line in lines.items()}
    then, numbers, (lost, got) = _split(was), [*lines], moved
    as_named = partial(_WORD.sub, lambda word: names.get(word[0], word[0]))
    sides = ((letters_of(as_named(line[2:])), line[:2]) for line in lines.values())
    there = [undone if undone in then else own for undone, own in sides]
    matched = SequenceMatcher(None, then, there, autojunk=False).get_opcodes()
    changes = [one for one in matched if one[0] != "equal"]
    came = [at for *_, first, last in changes for at in range(first, last)]
    stood = {letters: first for _, start, stop, first, _ in changes for letters in then[start:stop]}
    still = {there[at] for at in came} | got
    gone = {at for _, start, stop, *_ in changes for at in range(start, stop)}
    gone = {at for at in gone if then[at] not in still}
    new = [at for at in came if there[at] not in stood and there[at] not in lost]
    bare = [line.strip() for line in former]
    pairs = _pairs({at: bare[at] for at in gone if bare}, {at: shown[numbers[at]] for at in new})
    known, found = {word for line in bare for word in _WORD.findall(line)}, list[_Change]()
    for _, start, stop, first, last in changes:
        alike = {letters[0] for letters in then[start:stop]}
        left = [at for at in range(start, stop) if at in gone.difference(pairs.values())]
        if bare:
            left = [at for at in left if not _SAYS_LITTLE.search(bare[at])]
            left = [at for at in left if bare[at] not in elsewhere]
        for at in range(first, last):
            text, was_at = shown[numbers[at]], stood.get(there[at])
            order, news, line = _Order.NEWS, text, lines[numbers[at]][2:]
            if was_at is not None:  # it passed a line
                over = shown[numbers[max(0, (at if was_at < at else was_at) - 1)]]
                note = f"{_STOOD}{'before' if was_at < at else 'after'}: {over}"
            elif there[at] in lost:
                order, note = _Order.MOVED, _from(lost[there[at]])
            elif note := _block(line, then, former, range(start, stop)):
                news += note
                left = []
            elif at in pairs:
                was_text = bare[pairs[at]]
                note, news = _difference(was_text, text)
                if pairs[at] not in range(start, stop):  # it passed what did not change
                    passed = bare[start - 1] if pairs[at] < start else bare[stop]
                    note += f"; stood {'before' if pairs[at] < start else 'after'}: {passed}"
                    news += passed
                defaults = ({*_DEFAULT.findall(one)} for one in (text, was_text))
                is_head = _HEAD.match(text) and operator.ge(*defaults)
                order = _Order.MOVED if is_head else order
            elif (name, numbers[at]) in claims:
                note, news = _from_another(claims[name, numbers[at]], text)
            elif bare and len(left) == last - first == 1:
                note, news = _difference(bare[left.pop()], text)
            was_text, is_alike = bare[pairs[at]] if at in pairs else text, there[at][0] in alike
            if _NAMED.fullmatch(news) or (is_alike and _is_same(text, was_text, known)):
                order = _Order.SAME
            elif _SETS.match(text):
                order = max(order, _Order.MOVED)
            found.append(_Change(order, news, CodeLine(file, numbers[at], text + note)))
        said = _shortened(bare[one] for one in left) if bare else counted(len(left), "line")
        if left and first == last:
            after = last == len(numbers)
            number, where = numbers[last - after], "after it" if after else "before it"
            text = f"{shown[number]}  # gone {where}: {said}"
            found.append(_Change(_Order.NEWS, said, CodeLine(file, number, text)))
        elif left and bare:
            _, news, (_, number, text) = found[first - last]
            text = f"{text}{'; ' if '  # ' in text else '  # '}gone: {said}"
            line_now = CodeLine(file, number, text)
            found[first - last] = _Change(_Order.NEWS, f"{news} {said}", line_now)
    return found


def _is_same(text: str, was: str, known: AbstractSet[str]) -> bool:
    """Tell whether a line has other names alone, and none that was there already."""
    others = Counter(_WORD.findall(text)) - Counter(_WORD.findall(was))
    return _constants(text) == _constants(was) and known.isdisjoint(others)


def _constants(text: str) -> list[str]:
    """Return the numbers and texts of a line, which are none of its names."""
    return [one for one in _VALUE.findall(text) if not (one[0].isalpha() or one[0] in "_.")]


def _of_new(
    name: str, lines: Mapping[int, str], lost: Mapping[str, str], claims: _Claims, is_new: bool
) -> list[_Change]:
    """Return the lines of a function that no test led to, first what it begins with; those that
    other functions ``lost`` are no news.
    """
    since = "new" if is_new else UNREACHED
    file, _, function = name.partition(": ")
    shown = {number: _shown(line[2:]) for number, line in lines.items()}
    telling = [number for number, text in shown.items() if not _SAYS_LITTLE.search(text)]
    at = next((one for one in telling if NAME.search(shown[one])), [*telling, *lines][0])
    above = (text for number, text in shown.items() if text[:1] == "@" and number < at)
    head = " ".join((*above, shown[at]))
    note = f"  # in {function.rpartition('.')[2]}, {since}" if function else f"  # {since}"
    found = [_Change(_Order.MOVED, head, CodeLine(file, at, f"{head}  # {since}"))]
    for number, text in ((number, text) for number, text in shown.items() if number > at):
        order, said, news = _Order.NEWS, note, text
        if (was := lost.get(lines[number][:2])) is not None:
            order, said = _Order.MOVED, _from(was)
        elif (name, number) in claims:
            said, news = _from_another(claims[name, number], text)
        found.append(_Change(order, news, CodeLine(file, number, text + said)))
    return found


def _from(name: str) -> str:
    return f"  # from {name.rpartition(': ')[2] or 'another file'}"


def _from_another(was: tuple[str, str], text: str) -> tuple[str, str]:
    """Return in words what a line was in another function, and what differs."""
    note, news = _difference(was[1], text)
    return f"{note}, in {was[0].rpartition(': ')[2].rpartition('.')[2] or 'no function'}", news


def _pairs(gone: Mapping[int, str], came: Mapping[int, str]) -> dict[int, int]:
    """Return by positions of new lines those of the former ones that they are most like."""
    left, found = {text: at for at, text in sorted(gone.items())}, dict[int, int]()
    for at, text in came.items():
        for like in get_close_matches(text, left, 1):
            found[at] = left.pop(like)
    return found


def _block(line: str, then: Sequence[str], former: Sequence[str], gone: range) -> str:
    """Return in words that a line came into a block or out of one, "" of any other."""
    letters = {"    " + line: "no longer in", line.removeprefix("    "): "newly in a block"}
    for text, said in letters.items():
        found = [at for at in gone if then[at] == letters_of(text) and text != line]
        found = [at for at in found if not former or former[at] == text]  # equal by chance
        if found and said == "no longer in":
            above = (former[at] for at in range(found[0] - 1, -1, -1) if former)
            head = next((one for one in above if _indent(one) < _indent(text)), " a block:")
            return f"  # {said} {head.strip().removesuffix(':')}"
        if found:
            return f"  # {said}"
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _difference(was: str, now: str) -> tuple[str, str]:
    """Return in words what of a line was otherwise, and all that differs."""
    then, there = (re.findall(rf"{_VALUE.pattern}|\W", one) for one in (was, now))
    matched = SequenceMatcher(None, then, there, autojunk=False).get_opcodes()
    changes = [one for one in matched if one[0] != "equal"]
    gone = ["".join(then[start:stop]).strip(" ,") for _, start, stop, *_ in changes]
    came = ["".join(there[first:last]).strip(" ,") for *_, first, last in changes]
    note = f"  # was: {_shortened([was])}"
    are_values = all(map(_VALUE.fullmatch, (*gone, *came)))
    are_constants = [*map(_constants, gone)] == [[one] for one in gone]
    if not any(gone) and any(came) and all(map(_is_whole, came)):
        note = f"{_CAME}{listed([*filter(None, came)])}"
    elif are_values and (are_constants or len(gone) == 1):
        named = [_named_value(then, start, stop) for _, start, stop, *_ in changes]
        note = f"  # was: {listed(named, len(named)) if named[1:] else gone[0]}"
    return note, " ".join((*gone, *came))


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


def _shortened(lines: Iterable[str]) -> str:
    return shorten("; ".join(lines), _LONGEST, placeholder=" …")


def _shown(line: str) -> str:
    return _SECRET.sub(r"\1…", line.strip())


def _around(name: str) -> str:
    """Return the class or the file of a function."""
    return name.rpartition(".")[0]
