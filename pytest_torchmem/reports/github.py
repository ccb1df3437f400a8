"""GitHub and other CI systems: annotations, the job summary, and how to take results over."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.printable import printable_lines
from pytest_torchmem.reports.growth import line_of, why
from pytest_torchmem.snapshots.location import PROPOSAL, relative

if TYPE_CHECKING:
    from pytest_torchmem.reports.summary import Check, Summary


def marked_lines(checks: Iterable[Check], root: Path) -> Iterator[str]:
    """Yield the workflow commands that mark the lines which are to blame, or else those of tests;
    what several checks have in common is marked once.
    """
    found: dict[tuple[str, int, str], list[Check]] = {}
    for check in checks:
        place, cause = _blamed(check, root) or (check.location, check.message)
        found.setdefault((*place, cause), []).append(check)
    for (path, line, _), sharing in found.items():
        first, tests = sharing[0], dict.fromkeys(check.nodeid for check in sharing)
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        title = _property(f"memory: {first.nodeid}{more}")
        text = "\n\n".join(part for part in (first.message, first.advice) if part)
        file = _property(relative(root / path, _checkout(root)))
        yield f"::error file={file},line={line},title={title}::{_data(printable_lines(text))}"


def left_out_lines(summary: Summary) -> Iterator[str]:
    """Yield the workflow commands that say why tests were not checked, each reason once."""
    for reason, checks in summary.not_checked.items():
        (path, line), tests = checks[0].location, dict.fromkeys(check.nodeid for check in checks)
        title = _property("memory: 1 test" if len(tests) == 1 else f"memory: {len(tests)} tests")
        file = _property(relative(summary.root / path, _checkout(summary.root)))
        text = _data(printable_lines(f"{reason}: {', '.join(tests)}"))
        yield f"::notice file={file},line={line},title={title}::{text}"


def _blamed(check: Check, root: Path) -> tuple[tuple[str, int], str] | None:
    """Return the program's line that made memory grow, if its file is in the repository, and why
    it did.
    """
    snapshot = check.result.snapshot
    if not check.result.failed or snapshot is None or snapshot.diagnosis is None:
        return None
    name, _, number = line_of(snapshot.diagnosis).rpartition(":")
    path = Path.cwd() / name  # as it is shown
    if not number.isdecimal() or not path.is_file():
        return None
    if relative(path, _checkout(root)).startswith(".."):
        return None
    return (str(path), int(number)), why(snapshot.diagnosis)


def _checkout(root: Path) -> Path:
    """Return the top of the repository, from which GitHub wants paths; it need not be ``root``."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or root)


def apply_command(root: Path, proposal: Path) -> str:
    """Return the one command that puts the proposed snapshot files into a checkout at ``root``."""
    environment = os.environ
    below = _below_checkout(root)
    if environment.get("GITHUB_ACTIONS") == "true":
        run = environment.get("GITHUB_RUN_ID", "RUN_ID")
        repository = environment.get("GITHUB_REPOSITORY")
        where = f" --repo {repository}" if repository else ""
        return f"gh run download {run}{where} --name {PROPOSAL} --dir {shlex.quote(below)}"
    if environment.get("GITLAB_CI"):
        job = f"{environment.get('CI_API_V4_URL')}/projects/{environment.get('CI_PROJECT_ID')}/jobs"
        url = f"{job}/{environment.get('CI_JOB_ID')}/artifacts"
        inside = shlex.quote(relative(proposal, root))
        return (
            'curl --fail --location --header "PRIVATE-TOKEN: $GITLAB_TOKEN" '
            f"--output artifacts.zip {url} && unzip -o artifacts.zip "
            f"&& cp -R {inside}/. {shlex.quote(below)}"
        )
    return f"cp -R {shlex.quote(str(proposal))}/. {shlex.quote(str(root))}"


def _below_checkout(root: Path) -> str:
    checkout = os.environ.get("GITHUB_WORKSPACE") or os.environ.get("CI_PROJECT_DIR")
    return relative(root, Path(checkout)) if checkout else "."


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
