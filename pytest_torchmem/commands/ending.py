"""How a command ends: its exit status, and what it says of errors, whatever its streams are."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from pytest_torchmem.errors import TorchmemError
from pytest_torchmem.printable import printable_lines

USAGE = 2
_INTERRUPTED, _PIPE = 130, 141
"""What a shell reports of a program that SIGINT, or SIGPIPE, has ended."""
_OWN = str(Path(__file__).parent.parent)


def prepare_streams() -> None:
    """Let everything be printed, and to nowhere where a stream was closed (``>&-``).

    A name may have letters that a terminal has not.
    """
    if sys.stdout is None:  # Python's answer to a closed descriptor
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def status_of(run: Callable[[], int]) -> int:
    """Return the exit status of a command: its own, or that of what ended it, which is told."""
    output = sys.stdout
    try:
        status = run()
        output.flush()
    except BrokenPipeError:  # whoever reads has read enough, as ``head`` does
        _abandon(output)
        return _PIPE
    except KeyboardInterrupt:
        _tell("torchmem: interrupted")
        return _INTERRUPTED
    except (TorchmemError, OSError) as error:
        _abandon(output)  # it may be what cannot be written
        _tell(f"torchmem: error: {_told(error)}")
        return USAGE
    except (Exception, SystemExit) as error:
        if output.closed:
            _tell("torchmem: error: the program has closed the standard output, so nothing is told")
            return USAGE
        if not (lines := _raised_by_program(error)):
            raise
        _tell(f"torchmem: error: the program raised\n{''.join(lines).rstrip()}")
        return USAGE
    return status


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _abandon(stream: TextIO) -> None:
    """Let what was printed and cannot be written go nowhere, of which Python would tell at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # no stream of the process, or a closed one
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(text: str) -> None:
    """Print an error; the exit status tells of it where that cannot be."""
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _abandon(sys.stderr)


def _told(error: TorchmemError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _raised_by_program(error: BaseException) -> list[str]:
    """Return the traceback of what a function of the user's raised, without our part of it; nothing
    where something here failed. An operator that refuses its arguments is refused by a ``raise``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return []
    last = frames[-1]
    if last.filename.startswith(_OWN) and not (last.line or "").startswith("raise "):
        return []
    theirs = [one for one in frames if not one.filename.startswith(_OWN)]
    return [*traceback.format_list(theirs), *traceback.format_exception_only(error)]
