"""Where the snapshots of a test module are."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = "__torchmem__"


def snapshot_path(module: Path) -> Path:
    """Return the snapshot file of a test module: ``__torchmem__/test_net.json`` beside it."""
    stem = module.stem if module.suffix == ".py" else module.name
    return module.parent / DIRECTORY / f"{stem}.json"
