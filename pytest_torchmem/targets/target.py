"""The machine that a trace stands for: a host, and with fake cuda a GPU beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pytest_torchmem.targets.calibration import Calibration
from pytest_torchmem.targets.device_index import invalid_device_index
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host


@dataclass(frozen=True, slots=True)
class Target:
    """A host and perhaps a GPU, and what was measured of the GPU's kernels."""

    host: Host
    gpu: Gpu | None = None
    calibration: Calibration | None = None

    @property
    def device(self) -> torch.device:
        """The device that a trace reports on."""
        return torch.device("cuda", 0) if self.gpu else torch.device("cpu")

    def machine(self, device: str) -> Host | Gpu:
        """Return what kernels for ``"cpu"`` or ``"cuda"`` run on."""
        return self.gpu if device == "cuda" and self.gpu is not None else self.host

    def normalise(self, device: torch.device) -> torch.device:
        """Return ``device`` with the index it has when none is given."""
        if device.type == "cuda":
            if device.index:
                raise invalid_device_index(device)
            return device if device.index is not None else torch.device("cuda", 0)
        return torch.device(device.type)
