"""A snapshot file that git left with conflict markers: its two sides."""

from __future__ import annotations

import re

from pytest_torchmem.errors import SnapshotError

_MARKER = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?\r?$", re.MULTILINE)


def has_conflict(text: str) -> bool:
    """Tell whether ``text`` has conflict markers; no line of a snapshot looks like one."""
    return bool(_MARKER.search(text))


def sides(text: str) -> tuple[str, str]:
    """Return the file as it was on either side; raises ``SnapshotError`` where markers are torn.

    The common ancestor that git's ``diff3`` style adds is dropped.
    """
    ours: list[str] = []
    theirs: list[str] = []
    state = "both"
    follows = {"<": ("both", "ours"), "|": ("ours", "base"), ">": ("theirs", "both")}
    for line in text.splitlines(keepends=True):
        match = _MARKER.match(line)
        if match is None:
            if state in ("both", "ours"):
                ours.append(line)
            if state in ("both", "theirs"):
                theirs.append(line)
            continue
        sign = match.group(1)[0]
        expected, after = follows.get(sign, (state, "theirs"))
        if state != expected or (sign == "=" and state not in ("ours", "base")):
            raise SnapshotError("has mismatched conflict markers")
        state = after
    if state != "both":
        raise SnapshotError("has mismatched conflict markers")
    return "".join(ours), "".join(theirs)
