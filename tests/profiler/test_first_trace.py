"""The first trace of a process gives what the others give, and imports little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TWICE = """
import sys
import torch
from torch import nn
import pytest_torchmem as torchmem

def program(device):
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    features = model(torch.ones(16, 64, device=device))
    loss = torch.stack([features, features * 2]).pow(2).mean()
    loss.backward()
    optimizer.step()

assert "torch._dynamo" not in sys.modules
device = sys.argv[1]
first = torchmem.trace(lambda: program(device), device=device)
second = torchmem.trace(lambda: program(device), device=device)
assert "torch._dynamo" in sys.modules  # what this test is about
assert first.figures() == second.figures(), (first.figures(), second.figures())
"""

_NO_COMPILER = """
import sys
import torch
from torch import nn
import pytest_torchmem as torchmem

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
torchmem.trace(model, torch.ones(2, 8), device=sys.argv[1])
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("program", [_TWICE, _NO_COMPILER], ids=["same", "imports"])
def test_first_trace_of_a_process(program: str, device: str) -> None:
    """What torch imports on the way holds no tensors; a plain model needs none of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, device],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


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
    command = [sys.executable, "-W", "ignore", "-c", _BACK_AND_FORTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
