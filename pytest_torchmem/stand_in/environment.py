"""The environment of a command that finds a GPU of the catalogue in the place of a real one."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from pytest_torchmem.cudnn import driver
from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.cudnn.installed import find_installed
from pytest_torchmem.errors import UsageError
from pytest_torchmem.stand_in.build import (
    CUDNN_PROCESS,
    MAIN,
    Installation,
    build,
    find_installation,
    kernel_architectures,
    kernel_resources,
)
from pytest_torchmem.targets.gpus import Gpu

_MOST_DEVICES = 16
"""``DEVICES`` of runtime.c."""


def stand_in_environment(
    gpu: Gpu, devices: int = 1, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return ``environment``, by default this process's, with which torch finds GPUs of a kind.

    The stand-in is built at first use. Raises ``UsageError`` where that cannot be: no CUDA build of
    torch, no compiler, no headers, another platform, a GPU that this build has no kernels for.
    """
    installation = find_installation()
    architecture = _architecture(gpu, installation)
    place = build(installation)
    properties = device_properties(gpu.capability, gpu.multiprocessors)
    described = {
        "NAME": gpu.product,
        "CAPABILITY": "{}{}".format(*gpu.capability),
        "MULTIPROCESSORS": gpu.multiprocessors,
        "THREADS": gpu.threads_per_multiprocessor,
        "MEMORY": gpu.memory,
        "CONTEXT": gpu.context,
        "DEVICES": max(0, min(devices, _MOST_DEVICES)),
        "BINARY": architecture,
        "BLOCK_SHARED": properties["maxSharedMemoryPerBlockOptin"],
        "BLOCKS": properties["maxCtasPerSM"],
        "L2": properties["l2CacheSize"],
        "RUNTIME": installation.cuda[0] * 1000 + installation.cuda[1] * 10,
        **_cudnn(place, properties),
    }
    resources = kernel_resources(installation, place, architecture)
    if resources is not None:
        described["RESOURCES"] = resources
    preloaded = sorted(place.glob("lib*.so*"), key=lambda path: (path.name != MAIN, path.name))
    before = dict(os.environ if environment is None else environment)
    already = before.get("LD_PRELOAD", "").split(":")
    kept = [one for one in already if one and Path(one).parent.parent != place.parent]
    return {
        **{name: value for name, value in before.items() if not name.startswith("STAND_IN_")},
        **{f"STAND_IN_{name}": str(value) for name, value in described.items()},
        "LD_PRELOAD": ":".join([*map(str, preloaded), *kept]),
        "TRITON_LIBCUDA_PATH": str(place),
    }


def _architecture(gpu: Gpu, installation: Installation) -> int:
    """Return which of the build's kernels a GPU runs: the newest of its major version."""
    own = gpu.capability[0] * 10 + gpu.capability[1]
    built = kernel_architectures(installation)
    fitting = [one for one in built if one <= own and one // 10 == gpu.capability[0]]
    if not fitting:
        raise UsageError(
            f"torch {installation.version} has no kernels for {gpu.name} (sm_{own}): "
            f"it has {', '.join(f'sm_{one}' for one in built)}"
        )
    return max(fitting)


def _cudnn(place: Path, properties: Mapping[str, object]) -> dict[str, str]:
    """Describe the installed cuDNN, which answers in a process of its own, without the stand-in."""
    installed = find_installed()
    if isinstance(installed, str):
        return {}
    beside = place / "driver"
    beside.mkdir(exist_ok=True)
    (beside / driver.SONAME).write_bytes(driver.shared_object())
    major, minor, patch = installed.version
    command = (
        *("env", "-u", "LD_PRELOAD", f"LD_LIBRARY_PATH={installed.library_path(beside)}"),
        *(str(place / CUDNN_PROCESS), str(installed.library), json.dumps(properties)),
    )
    return {
        "CUDNN": str(major * 10000 + minor * 100 + patch),
        "CUDNN_PROCESS": shlex.join(command),
    }
