"""Memory regression tests for PyTorch models: the public names, imported when first used.

pytest imports this package at every start because of the plugin's entry point; nothing here may
import torch, so that a run which measures no memory pays nothing for it.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_torchmem.errors import TorchmemError
    from pytest_torchmem.graphs.fitting import advise, largest
    from pytest_torchmem.graphs.liveness import graph_profile, node_table
    from pytest_torchmem.graphs.scaling import scaling
    from pytest_torchmem.measurement.calibrate import calibrate
    from pytest_torchmem.measurement.measured import measure
    from pytest_torchmem.operators.custom_operators import OperatorModel
    from pytest_torchmem.plugin.fixture import Torchmem
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.calibration import read_calibration, write_calibration
    from pytest_torchmem.targets.gpus import Calibration, Gpu
    from pytest_torchmem.tracing.trace import trace

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "Gpu",
    "MemoryProfile",
    "OperatorModel",
    "Torchmem",
    "TorchmemError",
    "__version__",
    "advise",
    "calibrate",
    "graph_profile",
    "largest",
    "measure",
    "node_table",
    "read_calibration",
    "scaling",
    "trace",
    "write_calibration",
]

_HOMES = {
    "Calibration": "pytest_torchmem.targets.gpus",
    "Gpu": "pytest_torchmem.targets.gpus",
    "MemoryProfile": "pytest_torchmem.profile.profile",
    "OperatorModel": "pytest_torchmem.operators.custom_operators",
    "Torchmem": "pytest_torchmem.plugin.fixture",
    "TorchmemError": "pytest_torchmem.errors",
    "advise": "pytest_torchmem.graphs.fitting",
    "calibrate": "pytest_torchmem.measurement.calibrate",
    "graph_profile": "pytest_torchmem.graphs.liveness",
    "largest": "pytest_torchmem.graphs.fitting",
    "measure": "pytest_torchmem.measurement.measured",
    "node_table": "pytest_torchmem.graphs.liveness",
    "scaling": "pytest_torchmem.graphs.scaling",
    "read_calibration": "pytest_torchmem.snapshots.calibration",
    "trace": "pytest_torchmem.tracing.trace",
    "write_calibration": "pytest_torchmem.snapshots.calibration",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    was_enabled = gc.isenabled()
    gc.disable()  # modules are kept: to look for garbage among what they make takes as long again
    try:
        return getattr(import_module(home), name)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
