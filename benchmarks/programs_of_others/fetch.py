"""Brings the files of a program into a folder, by commit, and checks what came."""

import hashlib
import io
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.programs_of_others.manifest import Entry, Source

_ONE_AT_A_TIME = threading.Lock()


class FetchError(RuntimeError):
    """A program's files could not be had, or are not those of the manifest."""


def fetch(entry: Entry, cache: Path, mirrors: Path | None) -> Path:
    """Return the folder with the files of ``entry``, fetched and checked if it was not there.

    ``mirrors`` is a folder with git directories named ``<owner>/<name>.git``; without it, the
    repository's address is asked for the one commit.
    """
    folder = cache / f"{entry.source.name}-{entry.sha256[:16]}"
    with _ONE_AT_A_TIME:
        if not folder.exists():
            git = _git_directory(entry.source, cache, mirrors)
            command = ["git", f"--git-dir={git}", "archive", entry.source.commit, "--"]
            archive = subprocess.run([*command, *entry.paths], capture_output=True, check=False)
            if archive.returncode:
                raise FetchError(f"{entry.name}: {archive.stderr.decode().strip()}")
            partial = folder.with_name(folder.name + ".partial")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                # Python has filters since 3.10.12, 3.11.4 and 3.12; the checksum is compared below.
                options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                tar.extractall(partial, **options)
            partial.rename(folder)
    found = digest(folder)
    if found != entry.sha256:
        raise FetchError(f"{entry.name}: the files in {folder} have the checksum {found}")
    return folder


def digest(folder: Path) -> str:
    """Return one checksum of the names and contents of all files in ``folder``."""
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if "__pycache__" in path.parts:
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def _git_directory(source: Source, cache: Path, mirrors: Path | None) -> Path:
    owner_and_name = "/".join(source.repository.rstrip("/").split("/")[-2:])
    if mirrors is not None and (mirrors / f"{owner_and_name}.git").exists():
        return mirrors / f"{owner_and_name}.git"
    git = cache / "git" / f"{source.name}.git"
    if not git.exists():
        git.mkdir(parents=True)
        subprocess.run(["git", "init", "-q", "--bare", str(git)], check=True)
    command = ["git", f"--git-dir={git}", "fetch", "-q", "--depth", "1"]
    done = subprocess.run(
        [*command, source.repository, source.commit], capture_output=True, check=False
    )
    if done.returncode:
        raise FetchError(f"{source.repository} at {source.commit}: {done.stderr.decode().strip()}")
    return git
