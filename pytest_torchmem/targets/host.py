"""The host that a fake cpu stands for: what of a machine changes the bytes its kernels take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """A CPU host. ``capability`` is the vector instruction set that ATen and oneDNN dispatch on."""

    name: str
    threads: int
    capability: str
    """``"DEFAULT"``, ``"AVX2"`` or ``"AVX512"``, as ``torch.backends.cpu.get_cpu_capability()``."""
    onednn: bool


REFERENCE = Host(name="reference", threads=8, capability="AVX512", onednn=True)
"""The host of every snapshot, so that one written anywhere passes anywhere."""


def this_machine() -> Host:
    """Return the machine that runs this, with its present settings."""
    import torch

    return Host(
        name="here",
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        onednn=torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
    )
