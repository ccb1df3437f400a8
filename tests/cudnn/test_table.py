"""The table of ``torchmem cudnn``."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.commands.console import load_function
from pytest_torchmem.cudnn import library as asked
from pytest_torchmem.cudnn.questions import (
    Answer,
    ConvolutionQuestion,
    ExecutionPlan,
    Installed,
    Question,
)
from pytest_torchmem.reports import cudnn_table as tables
from pytest_torchmem.targets.gpus import LibraryAnswer, WorkspaceKey

MODEL = """
import torch
from torch import nn

def net():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False))
    return model, torch.empty(2, 3, 16, 16)

def step():
    net()[0].cuda()(torch.empty(2, 3, 16, 16, device="cuda")).sum()

def nothing():
    torch.ones(2, device="cuda") + 1

class Deciding(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        return y if x.sum() > 0 else y + 1

def deciding():
    return Deciding(3, 8, 3), torch.ones(2, 3, 16, 16)
"""


class Told:
    """A cuDNN that takes a copy of the input, and knows no engine for the second layer's weight."""

    version = (9, 20, 0)

    def ask(self, capability: tuple[int, int], multiprocessors: int, question: Question) -> Answer:
        """Answer for a GPU, by its number of multiprocessors."""
        assert isinstance(question, ConvolutionQuestion)
        if question.direction == "backward_weight" and question.x.shape[1] == 8:
            return Answer(why="cuDNN has no engine for it")
        nbytes = 4 * 2 * 3 * 16 * 16 + 16
        return Answer((ExecutionPlan(nbytes if multiprocessors == 108 else 2 * nbytes, 22),))


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "layers_of_test_table.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("layers_of_test_table", None)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(asked, "library", Told)
    installed = Installed(tmp_path / "libcudnn.so.9", (9, 20, 0), ())
    monkeypatch.setattr(tables, "find_installed", lambda: installed)


def test_a_model_on_two_gpus(command: Any) -> None:
    text = command("cudnn", "layers_of_test_table:net", "--gpu", "a100", "--gpu", "h100")
    assert "  float32[2,3,16,16] [8,3,3,3] [2,8,14,14]\n" in text
    assert "6.02 KiB engine 22: x" in text
    assert "  h100       12.03 KiB engine 22" in text.splitlines()[3]
    assert "Sequential.1  backward weight\n" in text
    assert text.count("no answer") == 3  # on both GPUs, and why
    assert "\ncuDNN 9.20.0\n" in text
    assert text.endswith("no answer: cuDNN has no engine for it\n")
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_where_there_is_room() -> None:
    found = tables.columns(load_function("layers_of_test_table:net"), ["a100", "h100"], [])
    header, first, *_ = tables.render(found, 200).splitlines()
    assert header.split() == ["layer", "x,", "w,", "y", "or", "query", "a100-80gb", "h100"]
    assert "12.03 KiB engine 22" in first
    assert len(tables.render(found, 80).splitlines()) > len(tables.render(found, 200).splitlines())


def test_a_model_whose_values_decide(command: Any) -> None:
    """It is made on ``meta`` first, and then with values."""
    assert "float32[2,3,16,16]" in command("cudnn", "layers_of_test_table:deciding")


def test_a_step_of_its_own(command: Any) -> None:
    assert "a100-80gb" in command("cudnn", "layers_of_test_table:step")
    assert "cuDNN was asked nothing" in command("cudnn", "layers_of_test_table:nothing")


def test_what_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    message = "layers_of_test_table has no 'other'"
    assert message in command("cudnn", "layers_of_test_table:other", status=2)
    monkeypatch.setattr(tables, "find_installed", lambda: "cuDNN is not installed")
    assert "cuDNN is not installed" in command("cudnn", "layers_of_test_table:net", status=2)


@pytest.mark.parametrize(
    ("nbytes", "copies"),
    [
        (16, ""),
        (4096 + 16, "x"),
        (4096 + 2304 + 8192 + 16, "x + w + y"),
        (4096 + 2 * 8192, "x + 2 y"),
        (4096 * 40, ""),
        (4096 + 8192 + 1600, ""),
    ],
)
def test_what_a_workspace_consists_of(nbytes: int, copies: str) -> None:
    geometry = "float16[2,16,8,8], float16[8,16,3,3], float16[2,32,8,8], [1,1], [1,1], [1,1]"
    question = WorkspaceKey("cudnn::convolution_forward", geometry)
    assert tables.made_of(LibraryAnswer(question, nbytes)) == copies
