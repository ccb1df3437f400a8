"""The machine that a trace stands for: a host, and with fake cuda a GPU beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pytest_torchmem.targets.device_index import invalid_device_index, not_linked
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.cudnn.library import Library
    from pytest_torchmem.targets.calibration import Calibration


@dataclass(slots=True)
class Selected:
    """The GPU that a traced program has made current."""

    index: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A host and perhaps GPUs of one kind, and what was measured of the GPU's kernels."""

    host: Host
    gpu: Gpu | None = None
    calibration: Calibration | None = None
    gpus: int = 1
    """How many GPUs there are, where there is one."""
    world: World | None = None
    """The process of a distributed program that is traced, if it is one."""
    cudnn: Library | None = None
    """The cuDNN that can be asked about the GPU."""
    why_no_cudnn: str = ""
    """Why there is none, where there is none."""
    index: int = 0
    """The GPU that is reported on, where there is no world."""
    selected: Selected = field(default_factory=Selected, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device that a trace reports on: in a world the GPU of the rank."""
        if self.gpu is None:
            return torch.device("cpu")
        return torch.device("cuda", self.index if self.world is None else self.world.local_rank)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices beside the host, or the host alone."""
        if self.gpu is None:
            return (self.device,)
        return tuple(torch.device("cuda", index) for index in range(self.gpus))

    def machine(self, device: str) -> Host | Gpu:
        """Return what kernels for ``"cpu"`` or ``"cuda"`` run on."""
        return self.gpu if device == "cuda" and self.gpu is not None else self.host

    def normalise(self, device: torch.device) -> torch.device:
        """Return ``device`` with the index it has when none is given.

        Raises what torch raises for a GPU that is not there and for other devices (mps, xpu).
        """
        if device.type == "cuda":
            if device.index is None:
                return torch.device("cuda", self.selected.index)
            if device.index >= self.gpus:
                raise invalid_device_index(device, self.gpus)
            return device
        if device.type not in ("cpu", "meta"):
            raise not_linked(device)
        return torch.device(device.type)
