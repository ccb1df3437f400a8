"""Functions of torch that other modules hold by names of their own."""

from pathlib import Path

import pytest

from tests.processes import run_program

PROGRAM = """
import sys
from torch import Generator, as_tensor, tensor
import torch
import torch.cuda as gpu
from torch.cuda import Event, Stream, device_count, is_available, max_memory_allocated as most
from pytest_torchmem import trace

originals = tensor, is_available, Stream

def body():
    import held_later
    assert is_available() and device_count() == 1 and gpu.is_available()
    x = tensor(1.0, device="cuda") + as_tensor([2.0], device="cuda")
    assert str(x.device) == "cuda:0" and most() == 3 * 512
    assert held_later.made().device == x.device
    torch.rand(2, generator=Generator("cuda").manual_seed(0), device="cuda")
    Stream(), Event()

for _ in range(2):
    trace(body, device="cuda")
    assert (tensor, is_available, Stream) == originals
    assert not is_available()
    assert sys.modules["held_later"].tensor is torch.tensor
"""


def test_they_are_replaced_there_too_and_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held_later.py").write_text(
        "from torch import tensor\n\ndef made():\n    return tensor([1], device='cuda')\n"
    )
    monkeypatch.chdir(tmp_path)
    run_program(PROGRAM)
