"""How much a figure may differ from its snapshot ("1%", "2%+64KiB"), and whose rule holds."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import DEFAULT_TOLERANCE, PEAK, SELECTORS, TOLERANCES
from pytest_torchmem.units import MOST, parse_size

DEVICES = ("cpu", "cuda")
_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%")
MOST_PERCENT = 1_000_000
_ACCEPTED = "write '2%', '64KiB', '2%+64KiB', or an int of bytes"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A relative and an absolute part, which add up."""

    percent: Decimal
    absolute: int
    text: str

    def allowance(self, before: int) -> int:
        """Return the bytes by which a figure that was ``before`` may differ."""
        return int(before * self.percent / 100) + self.absolute

    def __str__(self) -> str:
        return self.text


def parse_tolerance(value: object) -> Tolerance:
    """Return the tolerance written as ``value``; raises ``UsageError`` for what cannot be read."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST:
        return Tolerance(Decimal(0), value, f"{value} B")
    if not isinstance(value, str) or not value.strip() or len(value) > 200:
        raise UsageError(f"{_short(value)} is not a tolerance: {_ACCEPTED}")
    percent, absolute = Decimal(0), 0
    for part in value.split("+"):
        match = _PERCENT.fullmatch(part.strip())
        if match:
            percent += Decimal(match.group(1))
            if percent > MOST_PERCENT:
                raise UsageError(f"{value!r} is not a tolerance: it allows everything")
            continue
        try:
            absolute += parse_size(part.strip())
        except UsageError:
            raise UsageError(f"{value!r} is not a tolerance: {_ACCEPTED}") from None
    return Tolerance(percent, absolute, "+".join(" ".join(p.split()) for p in value.split("+")))


def _short(value: object) -> str:
    """Return a value that may be of any size and depth, for a message."""
    if isinstance(value, int) and abs(value) > MOST:
        return f"{hex(value)[:20]}…"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"


@dataclass(frozen=True, slots=True)
class ToleranceRule:
    """A tolerance, its place of definition, "" if built in, and its figures and devices; ``None``
    means all.
    """

    tolerance: Tolerance
    source: str
    device: str | None = None
    figure: str | None = None
    path: str | None = None

    def fits(self, device: str, figure: str) -> bool:
        return self.device in (None, device) and self.figure in (None, figure)

    def __str__(self) -> str:
        return f"{self.tolerance}, {self.source}" if self.source else str(self.tolerance)


Parse = Callable[[Any], Tolerance]
Level = Sequence[ToleranceRule]
"""The rules written in one place. Of several that fit, the one that says most holds."""

BUILT_IN: Level = (
    ToleranceRule(parse_tolerance(DEFAULT_TOLERANCE), source=""),
    *(
        ToleranceRule(parse_tolerance(tolerance), source="", figure=figure)
        for figure, tolerance in TOLERANCES.items()
    ),
)


def parse_rules(value: object, source: str) -> Level:
    """Return the rules of a marker, an argument or a snapshot entry.

    ``value`` is one tolerance, or a mapping such as ``{"backward": "2%", "cuda peak": "64KiB"}``.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        return (ToleranceRule(tolerance_in(value, source), source),)
    rules = []
    for selector, tolerance in value.items():
        rule = _select(str(selector), tolerance_in(tolerance, source), source)
        if rule.path is not None:
            raise UsageError(
                f"{selector!r} in {source} is neither a device ({', '.join(DEVICES)}) "
                f"nor a phase ({', '.join(SELECTORS)})"
            )
        rules.append(rule)
    return tuple(rules)


def parse_rule_lines(text: str, source: str, parse: Parse = parse_tolerance) -> Level:
    """Return the rules of an ini value: one a line, ``[path] [device] [phase]: tolerance``."""
    rules = []
    for line in (line.strip() for line in re.split(r"[\n;]", text)):
        if not line or line.startswith("#"):
            continue
        selector, colon, tolerance = line.rpartition(":")
        where = f"{source} ({selector.strip()})" if colon else source
        rules.append(_select(selector, tolerance_in(tolerance.strip(), source, parse), where))
    return tuple(rules)


def parse_budget_lines(text: str, source: str) -> Level:
    """Return the limits of an ini value, one a line: ``[path] [device] [phase]: size``."""
    rules = parse_rule_lines(text, source, lambda it: Tolerance(Decimal(0), parse_size(it), it))
    return tuple(replace(rule, figure=rule.figure or PEAK) for rule in rules)


def for_path(rules: Iterable[ToleranceRule], path: str) -> tuple[Level, Level]:
    """Split ini rules into those for ``path``, relative to the root, and the general ones."""
    from fnmatch import fnmatchcase

    rules = tuple(rules)
    special = [
        rule
        for rule in rules
        if rule.path
        and (fnmatchcase(path, rule.path) or path.startswith(rule.path.rstrip("/") + "/"))
    ]
    # The longest pattern is the closest: "tests/vision/*" wins over "tests/*".
    special.sort(key=lambda rule: -len(rule.path or ""))
    return tuple(special), tuple(rule for rule in rules if rule.path is None)


def find_rule(levels: Iterable[Level], device: str, figure: str) -> ToleranceRule:
    """Return the rule that applies: the most specific one of the first level that has any."""
    for level in levels:
        fitting = [rule for rule in level if rule.fits(device, figure)]
        if fitting:
            return max(fitting, key=lambda rule: (rule.figure is not None, rule.device is not None))
    return BUILT_IN[0]


def tolerance_in(value: object, source: str, parse: Parse = parse_tolerance) -> Tolerance:
    """Return a tolerance; an error of it begins with where it was written."""
    try:
        return parse(value)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _select(selector: str, tolerance: Tolerance, source: str) -> ToleranceRule:
    device = figure = path = None
    for word in selector.split():
        if word in DEVICES and device is None:
            device = word
        elif word in SELECTORS and figure is None:
            figure = SELECTORS[word]
        elif path is None and ("/" in word or "*" in word or word.endswith(".py")):
            path = word
        else:
            raise UsageError(
                f"{source}: {word!r} in {selector.strip()!r} is not a device "
                f"({', '.join(DEVICES)}), a phase ({', '.join(SELECTORS)}) or a path"
            )
    return ToleranceRule(tolerance, source, device, figure, path)
