"""Where the snapshots of a test module are, and which of them have lost their module."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = "__torchmem__"


def snapshot_path(module: Path) -> Path:
    """Return the snapshot file of a test module: ``__torchmem__/test_net.json`` beside it."""
    stem = module.stem if module.suffix == ".py" else module.name
    return module.parent / DIRECTORY / f"{stem}.json"


def orphans_in(directory: Path) -> list[Path]:
    """Return the snapshot files of ``directory`` whose test module does not exist, sorted."""
    files = sorted((directory / DIRECTORY).glob("*.json"))
    return [
        file
        for file in files
        if not (directory / f"{file.stem}.py").exists() and not (directory / file.stem).exists()
    ]
