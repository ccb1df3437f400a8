"""Paths as they are shown."""

from __future__ import annotations

import os


def working_directory() -> str:
    """Return the working directory, or "" where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def shown(path: str) -> str:
    """Return a path as it reads from the working directory, if there is one."""
    here = working_directory()
    return os.path.relpath(path, here) if here else path
