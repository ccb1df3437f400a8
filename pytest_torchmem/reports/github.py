"""GitHub and other CI systems: annotations, the job summary, and how to take results over."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.printable import printable_lines
from pytest_torchmem.snapshots.location import PROPOSAL, relative

if TYPE_CHECKING:
    from pytest_torchmem.reports.summary import Check


def annotation(check: Check, root: Path) -> str:
    """Return the workflow command that marks the line of a failed check.

    GitHub wants paths from the top of the repository, which need not be pytest's root.
    """
    path, line = check.location
    checkout = os.environ.get("GITHUB_WORKSPACE")
    if checkout:
        path = relative(root / path, Path(checkout))
    title = f"memory: {check.result.key.test}"
    properties = f"file={_property(path)},line={line},title={_property(title)}"
    advice = f"\n\n{check.advice}" if check.advice else ""
    return f"::error {properties}::{_data(printable_lines(check.message + advice))}"


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
