"""Storages of fake cuda: where they are, and how they get there.

TorchScript's files are among the ways: C++ reads and writes them, and has no GPU that tensors could
be on.
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import torch
import torch.serialization

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private.modes import make
from pytest_torchmem.torch_private.patches import Replacements
from pytest_torchmem.torch_private.tensors import bytes_of

_Base: Any = torch.UntypedStorage.__mro__[1]


def _index(device: torch.device) -> int:
    return device.index if device.type == "cuda" else -1


def _on_host(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


class Storages(Functions):
    """``torch.UntypedStorage`` on fake cuda; ``TypedStorage`` asks the one it wraps."""

    def replacements(self) -> Replacements:
        """Return what takes the place of torch's own."""
        storage: dict[str, Any] = {
            "device": property(self.device),
            "is_cuda": property(lambda storage: self.device(storage).type == "cuda"),
            "get_device": lambda storage: _index(self.device(storage)),
        }
        return [*super().replacements(), (torch.UntypedStorage, storage)]

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Make a storage, on the GPU if that is asked for; C++ would ask the build for it."""
        named = kwargs.get("device")
        if self._trace.off():
            return make(torch.UntypedStorage, *args, **kwargs)
        device = torch.device("cpu") if named is None else self._trace.device(as_device(named))
        storage = make(torch.UntypedStorage, *args, **{**kwargs, "device": _on_host(device)})
        if device.type == "cuda":
            self._trace.meet_storage(storage, device)
        elif device.type == "cpu":
            self._trace.expect_made(storage)
        return storage

    def device(self, storage: torch.UntypedStorage) -> torch.device:
        """Return where a storage is."""
        record = self._trace.record_of(storage)
        return cast(
            torch.device, _Base.device.__get__(storage) if record is None else record.ledger.device
        )

    @instead_of(torch.UntypedStorage)
    def clone(self, original: Any, storage: torch.UntypedStorage) -> Any:
        """Copy a storage on its device."""
        if self._trace.record_of(storage) is None:
            return original(storage)
        return self._as_bytes(storage).clone().untyped_storage()

    @instead_of(torch.serialization, "default_restore_location")
    def restore(self, original: Any, storage: Any, location: str) -> Any:
        """Book a storage that a file holds, or ``map_location`` asks to have, on the GPU."""
        if self._trace.off() or not str(location).startswith("cuda"):
            return original(storage, location)
        device = torch.device(location)
        if (device.index or 0) >= self._trace.gpus:  # as torch/serialization.py, _validate_device
            raise RuntimeError(
                f"Attempting to deserialize object on CUDA device {device.index} but "
                f"torch.cuda.device_count() is {self._trace.gpus}. Please use torch.load with "
                "map_location to map your storages to an existing device."
            )
        self._trace.meet_storage(storage, self._trace.device(device))
        return storage

    @instead_of(torch.UntypedStorage, "cuda", "cpu", "to")
    def copied(self, original: Any, storage: torch.UntypedStorage, *args: Any, **named: Any) -> Any:
        """Copy a storage as the tensor's method of that name does."""
        if self._trace.off() or storage.device.type == "meta":
            return original(storage, *args, **named)
        tensor = self._as_bytes(storage)
        copied = getattr(tensor, original.__name__)(*args, **named)
        return storage if copied is tensor else copied.untyped_storage()

    def _as_bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor on a storage, which one that C++ made is met with here."""
        with self._trace.working():
            tensor = bytes_of(storage)
        if self._trace.record_of(storage) is None:
            self._trace.meet(tensor)
        return tensor


_DEVICE = "pytest_torchmem_device"
"""The extra file that says where the tensors of a module were: the other says that of C++'s."""
_SAYS_DEVICE = re.compile(rb"/data\.pkl$|/extra/" + _DEVICE.encode())
_GPU = re.compile(rb"cuda:\d+")


def torchscript_files(trace: TraceContext) -> Replacements:
    """Let ``torch.jit.load`` put modules on a GPU, by ``map_location`` or from where they were."""
    original: Any = torch.jit.load

    @wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if trace.off():
            return original(f, map_location, *args, **kwargs)
        named = _gpu_in(f) if map_location is None else map_location
        device = None if named is None else trace.device(as_device(named))
        if device is None or device.type != "cuda":
            return original(f, map_location, *args, **kwargs)
        # All are first read to the host, and then moved (jit/serialization/import.cpp).
        return original(f, "cpu", *args, **kwargs).to(device)

    module: Any = vars(torch.jit)["RecursiveScriptModule"]
    names = ("save", "save_to_buffer")
    return [
        (torch.jit, {"load": load}),
        (module, {name: _saying_device(getattr(module, name), trace) for name in names}),
    ]


def _saying_device(original: Callable[..., Any], trace: TraceContext) -> Callable[..., Any]:
    @wraps(original)
    def save(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            tensors = [*module.parameters(), *module.buffers()]
            gpu = next((str(one.device) for one in tensors if one.is_cuda), "")
            if gpu:
                kwargs["_extra_files"] = {**(kwargs.get("_extra_files") or {}), _DEVICE: gpu}
        return original(module, *args, **kwargs)

    return save


def _gpu_in(file: Any) -> str | None:
    """Return the GPU that an archive's tensors were on, of a trace or for real."""
    is_stream = hasattr(file, "seek")
    place = file.tell() if is_stream else 0
    try:
        with ZipFile(file) as archive:
            said = [
                _GPU.search(archive.read(name))
                for name in archive.namelist()
                if _SAYS_DEVICE.search(name.encode())
            ]
    except (OSError, BadZipFile):  # torch says so
        return None
    finally:
        if is_stream:
            file.seek(place)
    return next((one[0].decode() for one in said if one), None)
