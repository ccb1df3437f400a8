"""Profiles that were saved: which files are some, and what is printed of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.printable import printable

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

_GZIP = b"\x1f\x8b"


def is_profile(path: Path) -> bool:
    """Return whether a file is what ``MemoryProfile.save`` wrote, rather than a snapshot."""
    from pytest_torchmem.profile.profile import SAVED

    if not path.is_file():  # reading a pipe would wait
        return False
    content = path.read_bytes()
    if content.startswith(_GZIP):
        return True  # snapshots are not compressed
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.get("kind") == SAVED


def print_profile(profile: MemoryProfile, rows: int = 10) -> None:
    """Print the table of a profile, its course and its warnings."""
    print(profile.table(rows))
    print(f"\nin the course of the step: {profile.sparkline()}")
    for warning in profile.warnings:
        print(f"note: {printable(warning)}")
