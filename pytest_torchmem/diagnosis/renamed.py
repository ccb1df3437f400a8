"""A snapshot with the names and lines that its modules have now: neither is a cause of anything."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from pytest_torchmem.profile.facts import Facts, Topic
from pytest_torchmem.profile.module_paths import prefixes
from pytest_torchmem.snapshots.alive import Group
from pytest_torchmem.snapshots.format import Entry


def moved_lines(before: Iterable[Group], now: Iterable[Group]) -> dict[str, str]:
    """Return by the lines of a snapshot what they are now, where as much is there as was.

    Of each file the operators of both are laid side by side in the order of their lines, as
    ``diff`` does with the lines themselves, which a snapshot does not keep. Those of the same
    modules come first: the next of two loops over layers is not the one before.
    """
    then, there = [*before], [*now]
    return _moved(then, there, of_numbers=False) | _moved(then, there, of_numbers=True)


def _moved(before: list[Group], now: list[Group], *, of_numbers: bool) -> dict[str, str]:
    old, new = _by_file(before, of_numbers), _by_file(now, of_numbers)
    found: dict[str, str] = {}
    for file in old.keys() & new.keys():
        then, there = sorted(old[file]), sorted(new[file])
        names = [one[1:] for one in then], [one[1:] for one in there]
        for start, other, size in SequenceMatcher(
            None, *names, autojunk=False
        ).get_matching_blocks():
            for a, b in zip(then[start : start + size], there[other : other + size], strict=True):
                found.setdefault(f"{file}:{a[0]}", f"{file}:{b[0]}")
    return found


def _by_file(
    groups: Iterable[Group], of_numbers: bool
) -> dict[str, set[tuple[int, str, str, str]]]:
    found: dict[str, set[tuple[int, str, str, str]]] = {}
    for group in groups:
        one = group.what
        file, _, number = one.line.rpartition(":")
        if number.isdecimal():
            numbers = group.numbers if of_numbers else ""
            own = int(number), one.module, one.source, numbers
            found.setdefault(file, set()).add(own)
    return found


_Tree = Mapping[str, Any]
"""What a module and those in it are, by their paths within it."""


def with_names_of(before: Entry, now: Facts) -> Entry:
    """Return an entry with the modules' names of the present facts, where the same modules, with
    the same settings and numbers, stand under another name: an attribute, a class, a wrapper.
    """
    names = _renames(before.facts.get(Topic.LAYERS, {}), now.get(Topic.LAYERS, {}))
    if not names:
        return before
    facts = {
        topic: {
            _renamed(name, names): _renamed(fact, names) if topic == Topic.TIED else fact
            for name, fact in known.items()
        }
        for topic, known in before.facts.items()
    }
    alive = before.alive
    if alive is not None:
        groups = (
            replace(one, what=one.what._replace(module=_renamed(one.what.module, names)))
            for one in alive.groups
        )
        alive = replace(alive, groups=tuple(groups))
    return replace(before, facts=facts, alive=alive)


def _renames(before: _Tree, now: _Tree) -> dict[str, str]:
    """Return the present names of modules by those that are gone, the outermost ones."""
    old, new = _paths(before), _paths(now)
    came = [path for path in new if path not in old]
    trees = {path: _tree(path, now) for path in came}
    found: dict[str, str] = {}
    for path in (one for one in old if one not in new):
        if any(one in found for one in prefixes(path)):
            continue
        own = _tree(path, before)
        same = [one for one in came if own and _are_same(path, own, one, trees[one])]
        outermost = [one for one in same if not any(one.startswith(f"{two}.") for two in same)]
        if len(outermost) == 1 and outermost[0] not in found.values():
            found[path] = outermost[0]
    return found


def _are_same(path: str, own: _Tree, other: str, tree: _Tree) -> bool:
    """Tell whether two modules are the same but for their names; of an outermost one, which is
    called by its class, only what is in it.
    """
    if path.count("*") != other.count("*"):
        return False
    if "." in path and "." in other:
        return own == tree
    inner = [{name: layers for name, layers in each.items() if name} for each in (own, tree)]
    return bool(inner[0]) and inner[0] == inner[1]


def _paths(layers: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(path for name in layers for path in prefixes(name))]


def _tree(path: str, layers: _Tree) -> _Tree:
    """Return a module and those in it."""
    return {
        name.removeprefix(path): own
        for name, own in layers.items()
        if name == path or name.startswith(f"{path}.")
    }


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a path, or what ends in one (``input of Net``), with its present name."""
    start, of, path = name.rpartition(" of ")
    for old, new in names.items():
        if path == old or path.startswith(f"{old}."):
            return f"{start}{of}{new}{path.removeprefix(old)}"
    return name
