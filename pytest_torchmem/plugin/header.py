"""The line at the start of a run; torch is looked for, and never imported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem import __version__
from pytest_torchmem.checks.defaults import DEFAULT_DEVICES, DEFAULT_GPU
from pytest_torchmem.figures import DEFAULT_TOLERANCE

if TYPE_CHECKING:
    from pytest_torchmem.checks.settings import Settings

_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


def header(settings: Settings | None) -> str:
    """Return the header: devices, GPU, torch, tolerance and what is done with snapshots.

    ``settings`` is ``None`` where nothing is set, so that nothing has to be read.
    """
    devices, gpu = tuple(DEFAULT_DEVICES.split(",")), DEFAULT_GPU
    tolerance, mode = DEFAULT_TOLERANCE, "comparing"
    if settings is not None:
        devices, gpu, mode = settings.devices, settings.gpu, settings.mode
        rules = settings.option_tolerance or settings.ini_tolerance
        tolerance = ", ".join(str(rule.tolerance) for rule in rules) or tolerance
    named = (f"cuda ({gpu})" if device == "cuda" else device for device in devices)
    version = torch_version()
    torch = f"torch {version}" if version else "torch is not installed"
    if settings is not None and settings.fake_cuda:
        mode = f"{mode}, every test sees a fake {settings.fake_cuda}"
    parts = (f"torchmem {__version__}", ", ".join(named), torch, f"tolerance {tolerance}", mode)
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
