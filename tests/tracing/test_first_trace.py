"""The first trace of a process gives what the others give, and imports little."""

import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_torchmem import MemoryProfile, measure, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.step import imports
from tests.processes import run_program

_NO_COMPILER = """
import gc
import sys
import torch
from torch import nn
import pytest_torchmem as torchmem
from pytest_torchmem.torch_private import dispatcher

def program(device):
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    features = model(torch.ones(16, 64, device=device))
    loss = torch.stack([features, features * 2]).pow(2).mean()
    loss.backward()
    optimizer.step()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)
        self.lstm, self.attention = nn.LSTM(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        x = self.lstm(self.norm(self.linear(x)))[0]
        x = self.attention(x, x, x)[0] + x.clamp(0, 1) + x.std(-1, keepdim=True) + x.softmax(-1)
        x = nn.functional.pad(x, (1, 1)).topk(8)[0] + torch.arange(8, device=x.device).float().cos()
        mask = torch.ones(8, 8, device=x.device).triu() > 0
        x = nn.functional.scaled_dot_product_attention(x, x, x).masked_fill(mask[:4], 0.0)
        return nn.functional.mse_loss(x, x.detach().roll(1)) + torch.stack([x, x]).var()

IMAGES = nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 4, 3), nn.MaxPool2d(2),
    nn.Dropout(), nn.Flatten(), nn.Linear(16, 3),
)
NOT_NEEDED = {"torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "sympy", "triton"}

def kept():
    functions = [one for one in gc.get_objects() if type(one) is type(kept)]
    return [one for one in functions if "__dynamo_disable" in vars(one)]

assert "torch._dynamo" not in sys.modules
device = sys.argv[1]
first = torchmem.trace(lambda: program(device), device=device)
torchmem.trace(Model(), torch.ones(4, 4, 8), device=device, optimizer=torch.optim.AdamW)
torchmem.trace(IMAGES, torch.randn(2, 3, 4, 4), device=device)
if torch.__version__ >= "2.13":
    assert not NOT_NEEDED & sys.modules.keys()
    assert not dispatcher._KEPT  # kernels of all operators take 25 ms; the program enters no modes
assert not kept()
assert torch.ones(2, device="meta").clamp(0, 1).shape == (2,)
assert "torch._dynamo" in sys.modules  # as it would be without a trace
assert kept()
second = torchmem.trace(lambda: program(device), device=device)
assert first.figures() == second.figures(), (first.figures(), second.figures())
"""

_COMPILER_FIRST = """
import sys
import torch
from torch import nn
import pytest_torchmem as torchmem

def program(device):
    import torch._dynamo as dynamo

    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(device)
    found = dynamo.explain(layers)(torch.ones(2, 2, device=device))
    assert (found.graph_count, found.graph_break_count, found.op_count) == (1, 0, 2), found
    asks = lambda x: x * torch.cuda.get_device_properties(x.device).major
    assert torch.compile(asks, fullgraph=True, backend="eager")(torch.ones(1, device=device)) == 8

torchmem.trace(lambda: program(sys.argv[1]), device=sys.argv[1])
"""
_PROGRAMS = {"imports": _NO_COMPILER, "compiler": _COMPILER_FIRST}


@pytest.mark.parametrize(
    ("name", "device"), [("imports", "cpu"), ("imports", "cuda"), ("compiler", "cuda")]
)
def test_first_trace_of_a_process(name: str, device: str) -> None:
    """What torch imports on the way holds no tensors; a program may import the compiler alone."""
    assert run_program(_PROGRAMS[name], device).stderr == ""


_BACK_AND_FORTH = """
import sys
import torch
import pytest_torchmem as torchmem

directory = sys.argv[1]
sys.path.append(directory)
torch.__path__.append(directory)  # a part of torch that imports the module that imports it

def program():
    import torchmem_back_and_forth
    return torch.ones(10)

assert torchmem.trace(program).peak == 40
assert "torch.torchmem_probe" in sys.modules
import_by_name = lambda: __import__("wsgiref.util", fromlist=["FileWrapper"], level=0)
assert torchmem.trace(lambda: torch.ones(len(import_by_name().__name__))).peak == 48
"""


def test_a_module_that_torch_imports_in_turn(tmp_path: Path) -> None:
    """It is being imported on the trace's thread, and another would wait for it for ever."""
    (tmp_path / "torchmem_back_and_forth.py").write_text("import torch.torchmem_probe\n")
    (tmp_path / "torchmem_probe.py").write_text("import torchmem_back_and_forth\n")
    assert run_program(_BACK_AND_FORTH, str(tmp_path)).stderr == ""


_WAYS = {
    "statement": "import torch.{module}",
    "from": "from torch import {module}",
    "name": "importlib.import_module('.{module}', 'torch')",
}


@pytest.mark.parametrize("run", [trace, measure])
def test_a_part_of_torch_that_keeps_an_exception_keeps_nothing_of_the_step(
    run: Callable[..., MemoryProfile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames lead to the program's, however it was imported, as by ``torch.func.grad``."""
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    for way, line in _WAYS.items():
        module = f"torchmem_{way}_{run.__name__}"
        (tmp_path / f"{module}.py").write_text("try: 1 / 0\nexcept Exception as e: KEPT = e\n")
        imports = line.format(module=module)
        program = f"def step():\n    x = ones(1000)\n    {imports}\n    return x.sum().item()\n"
        names = {"ones": torch.ones, "importlib": importlib}
        exec(program, names)
        profile = run(names["step"])
        assert sys.modules.pop(f"torch.{module}").KEPT.__traceback__.tb_frame
        assert (profile.peak, profile.end) == (4004, 0), way


_LOCALS = """
import threading

local = threading.local()
local.trees = {}

class Test:
    local = threading.local()
    local.precision = 1

class Own:
    def __init__(self):
        self.local = threading.local()
        self.local.depth = 2

own = Own()
"""


def test_what_a_part_of_torch_makes_for_its_thread_is_there(tmp_path, monkeypatch):
    """As the trees of torch/_inductor/cudagraph_trees.py, for the thread that imports it."""
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    (tmp_path / "torchmem_locals.py").write_text(_LOCALS)

    def step() -> None:
        found = importlib.import_module("torch.torchmem_locals")
        assert (found.local.trees, found.Test.local.precision, found.own.local.depth) == ({}, 1, 2)

    trace(step)
    sys.modules.pop("torch.torchmem_locals", None)


def test_what_torch_keeps_for_tests_is_what_the_importing_thread_sees(tmp_path, monkeypatch):
    """As ``TEST_CUDA`` of torch/testing/_internal/common_utils.py."""
    package = importlib.import_module("torch.testing._internal")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    (tmp_path / "torchmem_gpu.py").write_text("import torch\nGPU = torch.cuda.is_available()\n")

    def step() -> None:
        assert importlib.import_module("torch.testing._internal.torchmem_gpu").GPU

    trace(step, device="cuda")
    sys.modules.pop("torch.testing._internal.torchmem_gpu", None)


_CONSTANTS = """
import importlib
import torch
from torch import nn

RANGE = torch.arange(5.0)
NUMBERS = torch.tensor([1.0, 2.0]) * 2
LAYER = nn.Linear(2, 2)
TOTAL = int(RANGE.sum().item())

def program():
    scale = importlib.import_module("below").SCALE
    return scale * (LAYER(NUMBERS.requires_grad_()).sum() + RANGE.sum())
"""


def test_a_module_imported_in_a_trace_keeps_its_constants(device, tmp_path, monkeypatch):
    """They are real ones, and count as little as if the module had been imported before."""
    (tmp_path / "constants.py").write_text(_CONSTANTS)
    (tmp_path / "below.py").write_text("import torch\nSCALE = torch.full((3,), 7.0)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def program() -> None:
        import constants

        constants.program().sum().backward()

    try:
        first = trace(program, device=device)
        assert first.figures() == trace(program, device=device).figures()
        constants, below = sys.modules["constants"], sys.modules["below"]
    finally:
        for name in ("constants", "below"):
            sys.modules.pop(name, None)
    assert constants.RANGE.tolist() == [0, 1, 2, 3, 4]
    assert constants.NUMBERS.tolist() == [2, 4]
    assert constants.TOTAL == 10
    assert below.SCALE.tolist() == [7, 7, 7]
    assert constants.LAYER.weight.abs().sum().item() > 0


def test_what_a_module_makes_on_fake_cuda_belongs_to_the_trace(tmp_path, monkeypatch):
    (tmp_path / "placed.py").write_text(
        "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "ONES = torch.ones(1000, device=device) * 3\nMOVED = torch.ones(1000).to(device)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def program() -> None:
        import placed

        assert placed.ONES.is_cuda
        assert placed.MOVED.is_cuda

    try:
        assert trace(program, device="cuda").end == 2 * 4000
    finally:
        sys.modules.pop("placed", None)


def test_an_import_that_waits_for_the_step_is_told(tmp_path, monkeypatch):
    """As Inductor's do since torch 2.15, which takes a lock, and imports what takes it again."""
    (tmp_path / "waiting.py").write_text("import sys\nwith sys.torchmem_test_lock:\n    pass\n")
    lock = threading.RLock()
    monkeypatch.setattr(sys, "torchmem_test_lock", lock, raising=False)
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    monkeypatch.setattr(imports, "_PATIENCE", 0.1)

    def step() -> None:
        with lock:
            importlib.import_module("torch.waiting")

    with pytest.raises(UsageError, match=r"torch\.waiting cannot be imported.*holds\. Import it"):
        trace(step)
    sys.modules.pop("torch.waiting", None)


_UNDER_MODES = """
import sys
import torch
from pytest_torchmem import trace

mode = eval(sys.argv[1])
with mode if hasattr(mode, "__enter__") else torch.no_grad():
    assert trace(lambda: torch.tensor([1.5] * 8, dtype=torch.float32, device="cpu")).peak == 32
"""
_MODES = "inference_mode() set_default_dtype(torch.float64) set_default_device('meta')"


@pytest.mark.parametrize("mode", [*_MODES.split(), "set_anomaly_enabled(True)"])
def test_the_first_trace_is_made_under_any_mode(mode: str) -> None:
    """What tries torch's private parts runs a backward of its own."""
    assert run_program(_UNDER_MODES, f"torch.{mode}").stderr == ""
