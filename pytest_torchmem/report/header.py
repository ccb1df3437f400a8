"""The line at the start of a run; torch is looked for, and never imported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from pytest_torchmem import __version__
from pytest_torchmem.settings import Settings
from pytest_torchmem.tolerance import BUILT_IN

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def header(settings: Settings) -> str:
    """Return the header: devices, GPU, torch, tolerance and what is done with snapshots."""
    from pytest_torchmem.profiler.devices.catalogue import DEFAULT_GPU

    gpu = settings.gpu or DEFAULT_GPU
    devices = [f"cuda ({gpu})" if device == "cuda" else device for device in settings.devices]
    version = torch_version()
    levels = [settings.option_tolerance, settings.ini_tolerance, BUILT_IN]
    level = next(level for level in levels if level)
    tolerance = ", ".join(str(rule.tolerance) for rule in level)
    parts = [
        f"torchmem {__version__}",
        ", ".join(devices),
        f"torch {version}" if version else "torch is not installed",
        f"tolerance {tolerance}",
        settings.mode,
    ]
    return " | ".join(parts)


def torch_version() -> str | None:
    """Return the version of the torch that an import would find, ``None`` if there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return "of unknown version"
    match = _VERSION.search(text)
    return match.group(1) if match else "of unknown version"
