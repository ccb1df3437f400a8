"""The machine that a trace stands for: a host, and with fake cuda a GPU and its index beside it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from pytest_torchmem.targets.gpus import Calibration, Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.cudnn.library import Library

DeviceName: TypeAlias = Literal["cpu", "cuda"]
HostName: TypeAlias = Literal["reference", "here"]

NOT_LINKED = "PyTorch is not linked with support for"
"""How torch says that it lacks the device that is asked for; c10/core/impl/VirtualGuardImpl.h."""

MODELLED = """(a trace models the CPU, and NVIDIA's GPUs with device="cuda")"""


def invalid_device_index(device: torch.device | str, gpus: int = 1) -> RuntimeError:
    """Return the error for a GPU that is not there (c10/cuda/CUDAException.cpp)."""
    there = "one GPU, cuda:0" if gpus == 1 else f"{gpus} GPUs, cuda:0 to cuda:{gpus - 1}"
    return torch.AcceleratorError(
        f"CUDA error: invalid device ordinal: {device} (the trace models {there}; trace with "
        "gpus=... to have more)"
    )


def not_linked(device: torch.device) -> RuntimeError:
    """Return the error for a kind of device that a trace does not model."""
    return RuntimeError(f"{NOT_LINKED} {device.type} devices {MODELLED}")


def as_device(device: Any) -> torch.device:
    """Return the device that a program names; a number is one of ``cuda``."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def index_of(device: Any, gpus: int, current: int) -> int:
    """Return the index of the GPU that a program names; None and -1 are the current one.

    As ``torch.cuda._utils._get_device_index`` reads it. Raises what torch raises for a device that
    is none, or no GPU of the trace.
    """
    if device is None:
        return current
    if isinstance(device, int):
        index: int | None = device
    else:
        named = torch.device(device)
        if named.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {named}")
        index = named.index
    if index is None or index == -1:
        return current
    if not 0 <= index < gpus:
        raise invalid_device_index(f"cuda:{index}", gpus)
    return index


@dataclass(slots=True, repr=False)
class Selected:
    """The GPU that a traced program has made current."""

    index: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Target:
    """A host and perhaps GPUs of one kind, and what was measured of the GPU's kernels."""

    host: Host
    gpu: Gpu | None = None
    calibration: Calibration | None = None
    gpus: int = 1
    """How many GPUs there are, where there is one."""
    world: World | None = None
    """The process of a distributed program that is traced, if it is one."""
    cudnn: "Library | None" = None
    """The cuDNN that can be asked about the GPU."""
    why_no_cudnn: str = ""
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
