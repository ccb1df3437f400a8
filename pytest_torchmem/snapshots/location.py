"""Where the snapshots of a test module are, and which of them have lost their module."""

import os
from contextlib import suppress
from os.path import relpath
from pathlib import Path, PurePath

DIRECTORY = "__torchmem__"
CALIBRATION = "gpu-calibration.json"
"""What was measured on GPUs for a directory's snapshots; no snapshot file itself."""
PROPOSAL = "torchmem-proposal"
"""The directory that CI writes updated snapshots to, and the name under which it uploads them."""


def snapshot_path(module: Path) -> Path:
    """Return the snapshot file of a test module: ``__torchmem__/test_net.json`` beside it."""
    name = f"{module.stem if module.suffix == '.py' else module.name}.json"
    if name == CALIBRATION:
        name = f"{module.name}.json"
    return module.parent / DIRECTORY / name


def calibration_path(module: Path) -> Path:
    return module.parent / DIRECTORY / CALIBRATION


def is_snapshot(file: PurePath) -> bool:
    return file.parent.name == DIRECTORY and file.suffix == ".json" and file.name != CALIBRATION


def is_calibration(file: PurePath) -> bool:
    return file.parent.name == DIRECTORY and file.name == CALIBRATION


def orphans_in(directory: Path) -> list[Path]:
    """Return the snapshot files of ``directory`` whose test module does not exist, sorted.

    What symbolic links lead to may be another module's.
    """
    if (directory / DIRECTORY).is_symlink():
        return []
    files = sorted(filter(is_snapshot, (directory / DIRECTORY).glob("*.json")))
    targets = {os.path.realpath(file) for file in files if file.is_symlink()}
    return [
        file
        for file in files
        if not file.is_symlink()
        and not has_module(file)
        and not (targets and os.path.realpath(file) in targets)
    ]


def is_proposal(directory: Path, root: Path) -> bool:
    """Tell whether the snapshots of a directory are proposed: what CI left is unpacked anywhere.

    They are copies of files that the project has, below a directory that has no code.
    """
    folders = Path(relative(directory, root)).parts
    return PROPOSAL in folders or any(
        root.joinpath(*folders[first:], DIRECTORY, file.name).exists()
        and not any(root.joinpath(*folders[:first]).rglob("*.py"))
        for file in orphans_in(directory)
        for first in range(1, len(folders) + 1)
    )


def has_module(file: Path) -> bool:
    directory = file.parent.parent
    return os.path.lexists(directory / f"{file.stem}.py") or os.path.lexists(directory / file.stem)


def own_path(file: Path) -> Path:
    """Return where a snapshot file is, links of it and its directory not followed."""
    return Path(os.path.realpath(file.parent.parent), file.parent.name, file.name)


class Links:
    """The symbolic links among snapshot files; each directory is read once."""

    def __init__(self) -> None:
        self._by_directory: dict[Path, list[Path]] = {}

    def sharers(self, file: Path) -> set[Path]:
        """Return the own paths of the snapshot files that links make one with ``file``."""
        real = Path(os.path.realpath(file))
        links = self._by_directory.get(real.parent)
        if links is None:
            links = self._by_directory[real.parent] = []
            with suppress(OSError), os.scandir(real.parent) as entries:
                links += [Path(entry.path) for entry in entries if entry.is_symlink()]
        found = {own_path(other) for other in links if Path(os.path.realpath(other)) == real}
        return {path for path in (real, own_path(file), *found) if is_snapshot(path)}


def state_of(path: Path) -> str:
    """Return what differs once the file at ``path`` is another one, "" where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns} {found.st_size}"


def relative(path: Path, root: Path) -> str:
    """Return ``path`` relative to ``root``, with ``/``.

    With the function that was there on import: a test may have replaced it, and under another name
    the entry of a check would be one that its file no longer needs.
    """
    return Path(relpath(path, root)).as_posix()
