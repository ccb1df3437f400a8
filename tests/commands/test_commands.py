"""The commands ``torchmem trace`` and ``torchmem html``."""

import io
import json
import pickle
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.cli import main
from pytest_torchmem.commands import console
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.snapshots.compare import entry_of
from pytest_torchmem.snapshots.files import write
from pytest_torchmem.snapshots.format import Key, Snapshot, dump

STEP = """
import torch
from torch import nn

class Steps:
    @staticmethod
    def train():
        model = nn.Linear(64, 32).to(DEVICE)
        model(torch.zeros(8, 64, device=DEVICE)).sum().backward()

DEVICE = "cpu"
value = 3

def on_cuda():
    nn.Linear(64, 32).cuda()(torch.zeros(8, 64, device="cuda")).sum().backward()

def build():
    return nn.Linear(64, 32), torch.zeros(8, 64)

def raises():
    raise LookupError("the program's own")

def ends_itself():
    raise SystemExit(0)

def interrupts():
    raise KeyboardInterrupt

def nothing():
    return 3

def spread():
    torch.distributed.init_process_group("gloo")
    Steps.train()

def needs(batch, *, length, scale=1):
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "steps_of_commands.py").write_text(STEP)
    monkeypatch.delitem(sys.modules, "steps_of_commands", raising=False)
    return tmp_path


SIZES = {"hidden_size": 64, "intermediate_size": 128}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 4, "vocab_size": 100, "torch_dtype": "bfloat16"}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize("place", ["steps_of_commands", "steps_of_commands.py"])
@pytest.mark.parametrize("columns", ["72", "200"])
def test_a_function_is_traced(here, place, columns, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    out = command("trace", f"{place}:Steps.train")
    assert "forward peak" in out
    assert "█" in out
    assert "steps_of_commands.py:8" in out
    narrow = columns == "72"
    assert (", steps_of_commands.py:8" in out) is narrow
    assert max(map(len, out.splitlines())) <= int(columns)


def test_a_module_that_a_function_returns_is_run_with_options(here, command):
    out = command("trace", "steps_of_commands:build", "--gpu", "h100")
    assert "backward peak" in out
    assert re.search(r"baseline +10\.12 KiB", out)
    options = ("--optimizer", "AdamW", "--steps", "2")
    assert "optimizer peak" in command("trace", "steps_of_commands:build", *options)
    assert "cpu, rank 0 of 2" in command("trace", "steps_of_commands:spread", "--world-size", "2")


@pytest.mark.parametrize(
    ("written", "made"),
    [
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA},
            "2 × model.layers.*.mlp.up_proj.weight bfloat16[128, 64]",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], **VISION},
            "2 × vit.layers.*.mlp.fc1.weight float32[128, 64]",
        ),
    ],
)
def test_a_model_is_traced_by_name(here, written, made, command):
    (here / "own").mkdir()
    (here / "own" / "config.json").write_text(json.dumps(written))
    out = command("trace", "hf:./own", "--batch", "2", "--sequence", "8", "--largest", "50")
    assert made in out
    assert "gradient" in out


def test_a_terminal_shows_for_how_long_a_trace_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(console, "_PATIENCE", 0.01)
    with console.elapsed("tracing train.py:step on cuda"):
        time.sleep(0.2)
    first, *_, last = terminal.getvalue().lstrip("\r").split("\r")
    assert first == "tracing train.py:step on cuda: 0 s"
    assert not last.strip()


def page_data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def test_every_format_is_written(here: Path, command: Any) -> None:
    names = ("html", "svg", "json", "csv", "perfetto", "memory-snapshot")
    options = [word for name in names for word in (f"--{name}", f"out.{name}")]
    printed = command("trace", "steps_of_commands:on_cuda", "--gpu", "h100", *options)
    assert all((here / f"out.{name}").stat().st_size for name in names)
    assert printed.count("written: ") == len(names)
    assert printed.startswith(command("show", "out.json"))
    assert json.loads((here / "out.perfetto").read_text())["traceEvents"]
    assert pickle.loads((here / "out.memory-snapshot").read_bytes())["segments"]
    page = ["html", "out.json", "-o", "again.html"]
    assert main(page) == 0
    # A saved profile does not have the calls of operators, of which the table is made.
    data, again = (page_data(here / name) for name in ("out.html", "again.html"))
    assert data.pop("operators") is not None
    assert again.pop("operators") is None
    assert data == again
    assert main([*page, "--before", "out.json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["steps_of_commands"], "write package.module:function"),
        (["nowhere.at.all:f"], "there is no module 'nowhere.at.all'"),
        (["nowhere.py:f"], "nowhere.py does not exist, or is no file"),
        (["steps_of_commands:missing"], "steps_of_commands has no 'missing'"),
        (["steps_of_commands:value"], "is no function: int"),
        (["steps_of_commands:needs"], "needs arguments (batch, length): name a function without"),
        (["steps_of_commands:on_cuda"], "the program asks for cuda"),
        (["steps_of_commands:Steps.train", "--device", "cpu", "--gpu", "h100"], "--device cuda"),
        (["steps_of_commands:on_cuda", "--gpu", "h999"], "h999"),
        (["steps_of_commands:Steps.train", "--gpu", "h100"], "allocates nothing on cuda"),
        (["steps_of_commands:nothing"], "allocates nothing on cpu"),
        (["steps_of_commands:Steps.train", "--optimizer", "SGD"], "--optimizer: steps_of_commands"),
        (["steps_of_commands:build", "--optimizer", "Sgd"], "torch.optim has none of that name"),
        (["steps_of_commands:spread"], "say in how many with world_size=2"),
        (["hf:./nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_traced_is_told(here, arguments, said, command):
    error = command("trace", *arguments, status=2)
    assert error.startswith("torchmem: error: ")
    assert said in error


def test_the_error_of_the_program_is_its_own(here, command):
    told = command("trace", "steps_of_commands:raises", status=2)
    assert "LookupError: the program's own" in told
    assert "steps_of_commands.py" in told
    assert "pytest_torchmem/tracing" not in told
    (here / "step.py").write_text("import of_the_program")
    told = command("trace", "step.py:it", status=2)
    assert "importlib" not in told
    assert "pytest's setting pythonpath is not read here" in told
    for name in ("trace", "advise"):  # a program may call that a success
        told = command(name, "steps_of_commands:ends_itself", status=2)
        assert told.startswith("torchmem: error: the program raised\n")
        assert told.endswith("SystemExit: 0\n")
    assert command("trace", "steps_of_commands:interrupts", status=130) == "torchmem: interrupted\n"


def test_a_file_that_is_no_profile_is_told(here: Path, command: Any) -> None:
    (here / "other.json").write_text("{}")
    told = command("html", "other.json", "-o", "page.html", status=2)
    assert "nor a recording of a GPU (it is of kind 'unknown')" in told
    told = command("html", "missing.json", "-o", "page.html", status=2)
    assert told == "torchmem: error: missing.json: No such file or directory\n"
    assert not (here / "page.html").exists()


GROWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide = nn.Linear(64, width)
        self.narrow = nn.Linear(width, 8)

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(x)))

def before():
    Net(256)(torch.zeros(32, 64)).sum().backward()

def after():
    Net(512)(torch.zeros(32, 64)).sum().backward()
"""


def test_two_profiles_are_explained(here, command, monkeypatch):
    (here / "grown_of_commands.py").write_text(GROWN)
    for name, file in (("before", "before.json"), ("after", "after.json.gz")):
        assert main(["trace", f"grown_of_commands.py:{name}", "--json", file]) == 0
    out = command("explain", "before.json", "after.json.gz")
    assert "before.json -> after.json.gz" in out
    assert "float32[512, 64] (was [256, 64])" in out
    assert "Net.wide" in out
    assert "snapshot" not in out
    assert "allowed" not in out
    told = command("compare", "before.json", "after.json.gz", status=2)
    assert "torchmem explain BASE HEAD compares profiles" in told
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = command("explain", "after.json.gz", "before.json")
    assert "float32[256, 64] (was [512, 64])" in out
    assert "\033[32m-64.00 KiB\033[0m" in out
    assert command("explain", "before.json", "before.json") == "1 check is the same\n"


def test_causes_of_a_comparison_fit_the_terminal(here, command, monkeypatch):
    (here / "grown_of_commands.py").write_text(GROWN)
    key = Key("test_a_name_that_is_long_enough_for_a_line_of_its_own", device="cpu")
    for name in ("before", "after"):
        assert main(["trace", f"grown_of_commands.py:{name}", "--json", "profile.json"]) == 0
        entry = entry_of(key, MemoryProfile.load("profile.json"))
        write(here / name / "__torchmem__" / "test_net.json", dump(Snapshot({key: entry})))
    monkeypatch.setenv("COLUMNS", "80")
    out = command("compare", "before", "after", status=1)
    assert out.count(key.test) == 2  # of the figure and of the cause
    assert max(map(len, out.splitlines())) <= 80


def test_what_cannot_be_explained_is_told(here: Path, command: Any) -> None:
    (here / "empty").mkdir()
    told = command("explain", "empty", "empty", status=2)
    assert "empty and empty have no test or profile in common" in told
    (here / "broken.json").write_text('{"kind": "pytest-torchmem profile"}')
    assert "broken.json is not a profile" in command("explain", "broken.json", "empty", status=2)
