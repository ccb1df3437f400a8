"""Changes that would help: each saves what a trace of the changed step says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import advise, trace
from pytest_torchmem.cli import main
from pytest_torchmem.errors import UsageError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def blocks() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(6)))


X = torch.randn(64, 32)


def test_checkpoints_save_what_they_save_when_they_are_written() -> None:
    model = blocks()
    found = {one.change.partition(":")[0]: one for one in advise(model, X)}
    one = found["checkpoint each of * (6)"]
    written = trace(Checkpointed(model), X)
    assert one.profile.peak == written.peak
    assert one.saved == trace(model, X).peak - written.peak > 0
    assert one.flops == 6 * 2 * 64 * 32 * 128  # all but the last product, which nobody asks for
    assert type(model[0]) is Block


def test_of_layers_only_as_many_as_a_budget_takes() -> None:
    model = blocks()
    before = trace(model, X).peak
    every = min(advise(model, X), key=lambda one: one.profile.peak).profile.peak
    budget = (before + every) // 2
    first, *others = advise(model, X, budget=budget)
    assert re.match(r"checkpoint \d of \*:", first.change)
    assert first.profile.peak <= budget < before
    assert any(other.flops > first.flops for other in others)


def test_activations_in_place() -> None:
    layers = (nn.Linear(32, 512), nn.ReLU())
    [found] = [
        one for one in advise(nn.Sequential(*layers), X, backward=False) if "inplace" in one.change
    ]
    assert found.change == "ReLU(inplace=True)"
    assert (found.saved, found.flops) == (64 * 512 * 4, 0)
    assert layers[1].inplace is False


def test_a_lower_precision_saves_what_autocast_saves() -> None:
    class Lower(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.inner(x)  # type: ignore[no-any-return]

    model, x = blocks(), torch.randn(512, 32)
    found = {one.change.partition(" under")[0]: one for one in advise(model, x, device="cuda")}
    one = found["the forward"]
    assert one.saved == trace(model, x, device="cuda").peak - one.profile.peak > 0
    assert one.profile.peak == trace(Lower(model), x, device="cuda").peak
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all("autocast" not in one.change for one in advise(model, x))


def test_a_step_in_which_the_optimizer_is_the_peak() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(1, 256)
    found = {
        one.change: one for one in advise(model, x, optimizer=torch.optim.AdamW, device="cuda")
    }
    by_loop = found["foreach=False in the optimizer"]
    options = {"optimizer": lambda p: torch.optim.AdamW(p, foreach=False), "device": "cuda"}
    assert by_loop.profile.peak == trace(model, x, **options).peak
    assert found["fused=True in the optimizer"].saved >= by_loop.saved


def test_a_function_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nn\.Module"):
        advise(lambda: None)  # type: ignore[arg-type]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))\n"
        "    return model, torch.randn(1, 256)\n"
    )
    arguments = ["advise", f"{file}:build", "--optimizer", "AdamW", "--gpu", "t4"]
    assert main(arguments) == 0
    assert "foreach=False in the optimizer" in capsys.readouterr().out
    assert main(["advise", f"{file}:missing"]) == main(["advise", "nothing"]) == 2
    assert main([*arguments, "--optimizer", "NoSuch"]) == 2
    assert "NoSuch" in capsys.readouterr().err
