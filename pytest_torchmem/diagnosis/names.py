"""Modules of a snapshot by their present names: renamed, moved, numbered, or called by themselves.

A class that has another name, a module that is in another one now, the layers of a ``Sequential``
that a class names: what is said of them stays comparable.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pytest_torchmem.profile.facts import Layer, Topic
from pytest_torchmem.profile.module_paths import prefixes
from pytest_torchmem.snapshots.format import Entry

_Tree = Mapping[str, Any]
"""What a module and those in it are, by their paths within it."""


def with_names_of(before: Entry, now: Entry) -> tuple[Entry, Entry, Mapping[str, str]]:
    """Return two entries with present names of modules, outermost first, and what these were.

    Where one of them calls a model and the other its parts, both tell of the parts.
    """
    layers, found = now.facts.get(Topic.LAYERS, {}), dict[str, str]()
    while names := _renames(before.facts.get(Topic.LAYERS, {}), layers):
        before = _moved(before, _by_names(names, layers))
        found |= {name: was for was, name in names.items()}
    before = _moved(before, _by_numbers(before.facts.get(Topic.LAYERS, {}), layers))
    parts: dict[tuple[str, bool], list[str]] = {}
    for name, was in found.items():
        if ("." in name) != ("." in was):
            whole = max(name, was, key=lambda path: path.count(".")).partition(".")[0]
            parts.setdefault((whole, "." in name), []).append(name)
    for (whole, is_new), own in parts.items():
        if own[1:]:  # and no module that was put into another one
            roots = {whole, *(found[name] if is_new else name for name in own), *own}
            before, now = _of_parts(before, whole, own, roots), _of_parts(now, whole, own, roots)
    return before, now, found


_OF_CALLS = (Topic.INPUTS, Topic.ARGUMENTS, Topic.CALLS)
"""What is known of outermost modules alone."""


def _of_parts(entry: Entry, whole: str, parts: Iterable[str], roots: Collection[str]) -> Entry:
    """Return an entry in which a model's parts run in the modes of the model, and none is said to
    be called by the program.
    """
    facts = {
        topic: {
            name: fact for name, fact in known.items() if name.rpartition(" of ")[2] not in roots
        }
        if topic in _OF_CALLS
        else known
        for topic, known in entry.facts.items()
    }
    modes = dict(facts.get(Topic.MODES, {}))
    if inherited := modes.pop(whole, None):
        facts[Topic.MODES] = {**dict.fromkeys(parts, inherited), **modes}
    return replace(entry, facts=facts)


_NUMBERED = (Topic.MODES, Topic.LAYERS, Topic.GIVEN, Topic.SIZES)
"""Whose facts say which modules of a pattern they are of."""
_Moves = Callable[[str, str], tuple[str, str]]
"""The present pattern and numbers of a module, by its former ones."""


def _moved(entry: Entry, moves: _Moves) -> Entry:
    facts: dict[str, dict[str, Any]] = {topic: {} for topic in entry.facts}
    all_facts = ((t, n, one) for t, known in entry.facts.items() for n, one in known.items())
    for topic, name, fact in all_facts:
        own = facts[topic]
        if topic in _NUMBERED:
            for one in fact:
                there, numbers = moves(name, one.numbers)
                own[there] = (*own.get(there, ()), one._replace(numbers=numbers))
        elif topic == Topic.FROZEN:
            there, own[there] = moves(name, fact)
        else:
            own[moves(name, "")[0]] = moves(fact, "")[0] if topic == Topic.TIED else fact
    groups = []
    for one in entry.alive.groups if entry.alive is not None else ():
        module, numbers = moves(one.what.module, one.numbers)
        groups.append(replace(one, what=one.what._replace(module=module), numbers=numbers))
    alive = entry.alive and replace(entry.alive, groups=tuple(groups))
    return replace(entry, facts=facts, alive=alive)


def _by_names(names: Mapping[str, str], layers: _Tree) -> _Moves:
    """Return what moves modules to other names, with fewer or more stars."""

    def moves(path: str, numbers: str) -> tuple[str, str]:
        start, of, inner = path.rpartition(" of ")  # as in ``input of Net``
        was = next((old for old in names if _is_in(inner, old)), None)
        name = path if was is None else f"{start}{of}{names[was]}{inner.removeprefix(was)}"
        less = path.count("*") - name.count("*")
        if less > 0:
            return name, "/".join(numbers.split("/")[less:])
        around = next((one for one in prefixes(name) if one.count("*") == -less), "")
        there = [one.numbers for one in layers.get(around, ())[:1]] if less else []
        return name, "/".join(filter(None, (*there, numbers)))

    return moves


def _by_numbers(before: _Tree, layers: _Tree) -> _Moves:
    """Return what moves layers that a ``Sequential`` numbered to the names that a class gives them,
    or back, where all that have widths are there.
    """
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for parent in {*_paths(before)} & {*_paths(layers)}:
        old, new = _children(parent, before, layers), _children(parent, layers, before)
        pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for own, layer in old.items():
            alike = (one for one in new if new[one][:-1] == layer[:-1] and bool(one[1] or own[1]))
            twin = next((one for one in alike if one not in pairs.values()), None)
            pairs |= {own: twin} if twin is not None and bool(twin[1]) != bool(own[1]) else {}
        if all(own in pairs for own, layer in old.items() if layer.widths):
            found |= pairs

    def moves(path: str, numbers: str) -> tuple[str, str]:
        start, of, inner = path.rpartition(" of ")
        for (pattern, number), (name, new) in found.items():
            stars = numbers.split("/")
            last = pattern.count("*") - bool(number)
            if _is_in(inner, pattern) and (not number or stars[last : last + 1] == [number]):
                stars[last : last + bool(number)] = [new]
                there = f"{start}{of}{name}{inner.removeprefix(pattern)}"
                return there, "/".join(filter(None, stars))
        return path, numbers

    return moves


def _children(
    parent: str, layers: Mapping[str, tuple[Layer, ...]], others: _Tree
) -> dict[tuple[str, str], Layer]:
    """Return a module's layers that are not among others, by pattern and, in a list, number."""
    found = {}
    for name in layers.keys() - others.keys():
        around, _, own = name.rpartition(".")
        for one in layers[name] if around == parent else ():
            found[name, one.numbers.rpartition("/")[2] if own == "*" else ""] = one
    return found


def _renames(before: _Tree, now: _Tree) -> dict[str, str]:
    """Return the present names of modules by those that are gone, the outermost ones."""
    old, new = _paths(before), _paths(now)
    came = [path for path in new if path not in old]
    trees = {path: _tree(path, now) for path in came}
    found: dict[str, str] = {}
    left = [one for one in old if one not in new]
    for path in left:
        if any(one in found for one in prefixes(path)):
            continue
        own = _tree(path, before)
        alike = {one: _likeness(path, own, one, trees[one]) for one in came if own}
        same = [one for one in alike if 2 * alike[one] >= 1 and alike[one] == max(alike.values())]
        outermost = [one for one in same if not any(one.startswith(f"{two}.") for two in same)]
        around, _, last = path.rpartition(".")
        there = [one for one in outermost if one.rpartition(".")[0] == around]
        named = [one for one in there if last in one.rpartition(".")[2]]  # lora_query was query
        outermost = named if len(named) == 1 else there if len(there) == 1 else outermost
        twins = [one for one in left if one != path and _tree(one, before) == own]
        beside = len(named) != 1 and any(one.rpartition(".")[0] == around for one in twins)
        # Where fewer stand around than did, it is not known which of them a changed one was.
        gone, others = (sum(one.rpartition(".")[0] == around for one in s) for s in (left, came))
        is_sure = gone <= others or max(alike.values(), default=0) == 1
        if len(outermost) == 1 and outermost[0] not in found.values() and is_sure and not beside:
            found[path] = outermost[0]
    return found


def _likeness(path: str, own: _Tree, other: str, tree: _Tree) -> float:
    """Return which part of what modules are is the same, 1 where they differ in name alone.

    Elsewhere than before a module counts only where it is as it was, or its layers with their
    widths are; of outermost ones, what is in them. Layers of a class in another setting are half
    the same. One of an outermost module may be called by itself, or have been.
    """
    if ("." in path) != ("." in other) and _unnumbered(own) == _unnumbered(tree):
        return 1
    if path.count("*") != other.count("*"):
        return 0
    sides = [own, tree]
    if not ("." in path and "." in other):
        sides = [{name: layers for name, layers in each.items() if name} for each in sides]
    elif path.rpartition(".")[0] != other.rpartition(".")[0]:
        wide = [{n: [(*one[::2], one.widths) for one in each[n]] for n in each} for each in sides]
        has_widths = any(one.widths for layers in own.values() for one in layers)
        return 1 if own == tree else (has_widths and wide[0] == wide[1]) / 2
    known, there = sides
    same = sum(bool(known[name] == there[name]) for name in known.keys() & there.keys())
    kinds = [{(n, one.kind) for n in each for one in each[n]} for each in sides]
    return (same + len(kinds[0] & kinds[1])) / max(2 * len(known), 2 * len(there), 1)


def _unnumbered(tree: _Tree) -> _Tree:
    return {name: [one[:-1] for one in layers] for name, layers in tree.items()}


def _paths(layers: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(path for name in layers for path in prefixes(name))]


def _tree(path: str, layers: _Tree) -> _Tree:
    return {name.removeprefix(path): own for name, own in layers.items() if _is_in(name, path)}


def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
