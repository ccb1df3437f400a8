"""The one line that stands for a failure in pytest's short summary and as JUnit's message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchmem.checks.failure import MemoryCheckFailed

if TYPE_CHECKING:
    import pytest


def in_one_line(report: pytest.TestReport, error: BaseException) -> None:
    """Let the ``report`` of a check that failed be told by its headline where there is one line.

    pytest prints all of ``reprcrash.message`` there in CI and with ``-vv``
    (``_get_line_with_reprcrash_message`` in ``_pytest/terminal.py``), and all of the message once
    more is pages. The section of the failure is made of ``reprtraceback``, which keeps the whole.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(error, MemoryCheckFailed) and crash is not None:
        crash.message = f"{type(error).__name__}: {error.headline}"
