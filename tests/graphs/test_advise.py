"""Changes that would help: each saves what a trace of the changed step says."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pytest_torchmem
from pytest_torchmem import MemoryProfile, advise, trace
from pytest_torchmem.advice.suggest import Trials, changes_of
from pytest_torchmem.cli import main
from pytest_torchmem.errors import UsageError
from tests.modules import Parts


class Block(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Checkpointed(Parts):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def blocks(count: int = 6) -> nn.Sequential:
    parts = ((nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(count))
    return nn.Sequential(*(Block(inner=nn.Sequential(*each)) for each in parts))


X = torch.randn(64, 32)


def test_checkpoints_save_what_they_save_when_they_are_written() -> None:
    model = blocks()
    found = {one.change.partition(":")[0]: one for one in advise(model, X)}
    one = found["checkpoint each of * (6)"]
    written = trace(Checkpointed(layers=model), X)
    assert one.profile.peak == written.peak
    assert one.saved == trace(model, X).peak - written.peak > 0
    assert one.flops == 6 * 2 * 64 * 32 * 128  # all but the last product, which nobody asks for
    assert type(model[0]) is Block


def test_layers_whose_paths_look_alike_are_told_by_their_class() -> None:
    model = nn.Sequential(nn.Linear(32, 32), *blocks(3), nn.Linear(32, 32))
    assert any("checkpoint each Block of * (3)" in one.change for one in advise(model, X))


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
    advised = advise(nn.Sequential(*layers), X, backward=False)
    [found] = [one for one in advised if "inplace" in one.change]
    assert found.change == "relu in place (inplace=True)"
    assert (found.saved, found.flops) == (64 * 512 * 4, 0)
    assert layers[1].inplace is False


def test_a_lower_precision_saves_what_autocast_saves() -> None:
    class Lower(Parts):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.inner(x)  # type: ignore[no-any-return]

    model, x = blocks(), torch.randn(512, 32)
    found = {one.change.partition(" under")[0]: one for one in advise(model, x, device="cuda")}
    one = found["the forward"]
    assert one.saved == trace(model, x, device="cuda").peak - one.profile.peak > 0
    assert one.profile.peak == trace(Lower(inner=model), x, device="cuda").peak
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all("autocast" not in one.change for one in advise(model, x))


def test_a_step_in_which_the_optimizer_is_the_peak() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = torch.randn(1, 256)
    advised = advise(model, x, optimizer=torch.optim.AdamW, device="cuda")
    found = {one.change: one for one in advised}
    by_loop = found["foreach=False in the optimizer"]
    options = {"optimizer": lambda p: torch.optim.AdamW(p, foreach=False), "device": "cuda"}
    assert by_loop.profile.peak == trace(model, x, **options).peak
    assert found["fused=True in the optimizer"].saved >= by_loop.saved


class Head(nn.Module):
    """A hidden layer and the loss of a vocabulary, written in one of three ways."""

    def __init__(self, loss: str = "") -> None:
        super().__init__()
        self.inner, self.head, self.loss = nn.Linear(32, 32), nn.Linear(32, 4096), loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.inner(x)
        if self.loss == "fused":
            return F.linear_cross_entropy(
                x,
                self.head.weight,
                target,
                linear_bias=self.head.bias,
                options=nn.LinearCrossEntropyOptions(),
            )
        if self.loss == "in 8 chunks":
            parts = [
                checkpoint(self.part, *both, use_reentrant=False)
                for both in zip(x.chunk(8), target.chunk(8), strict=True)
            ]
            return torch.stack(parts).sum() / len(x)
        logits = self.head(x).unsqueeze(0).float()
        return F.cross_entropy(logits.view(-1, 4096), target)

    def part(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), target, reduction="sum")


@pytest.mark.parametrize("loss", ["fused", "in 8 chunks"])
def test_a_loss_without_logits_saves_what_it_saves_when_it_is_written(loss: str) -> None:
    if loss == "fused" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    inputs = torch.randn(256, 32), torch.zeros(256, dtype=torch.int64)
    found = [one for one in trace(Head(), *inputs).suggestions() if "the loss" in one.change]
    (one,) = (one for one in found if loss in one.change)
    assert one.profile.peak == trace(Head(loss), *inputs).peak
    assert one.saved == trace(Head(), *inputs).peak - one.profile.peak > 2 * 256 * 4096


def test_a_call_does_not_write_over_what_is_needed_afterwards() -> None:
    class Activated(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            y = F.relu(x)
            return x + y if self.residual else y + 1

    saving = [
        any("in place" in one.change for one in advise(model, X, backward=False))
        for residual in (False, True)
        for model in [Activated(layer=nn.Linear(32, 512), residual=residual)]
    ]
    assert saving == [True, False]


def test_conversions_and_buffers_in_a_narrower_type() -> None:
    class Upcast(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).float().exp() + self.table.sum()

    x = torch.zeros(1024, 32, dtype=torch.bfloat16)
    model = Upcast(layer=nn.Linear(32, 512, dtype=x.dtype), table=torch.ones(256, 512))
    found = {one.change: one for one in advise(model, x)}
    (kept,) = (one for text, one in found.items() if text.startswith("bfloat16 kept at"))
    assert kept.saved >= 1024 * 512 * 2
    assert found["the buffer table in bfloat16"].saved == 256 * 512 * 2


def test_a_function_that_runs_a_step() -> None:
    def step() -> None:
        model = blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            model(X).sum().backward()
            optimizer.step()

    profile = trace(step)
    found = {one.change.partition(":")[0]: one for one in profile.suggestions()}
    assert "checkpoint each of * (6)" in found
    assert found["zero_grad(set_to_none=True)"].saved > 0
    assert trace(step).peak == profile.peak


def test_compiled_code_that_keeps_less_is_traced_as_it_is_when_that_is_written() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    again = partial(trace, model, torch.randn(256, 32), mode="aot")
    trials = Trials(again(), again)
    found = trials.of(next(one for one in changes_of(trials, "") if "budget = 0.5" in one.text))
    with torch._functorch.config.patch(activation_memory_budget=0.5):  # type: ignore[attr-defined]
        written = again()
    assert found.profile.figures() == written.figures()
    assert written.forward_peak < trials.before.forward_peak
    assert found.flops >= 2 * 256 * 32 * 32


def test_changes_of_compiled_code_save_what_they_save_when_they_are_written() -> None:
    class Model(nn.Module):
        def __init__(self, checkpoints: bool = False, loss: str = "") -> None:
            super().__init__()
            layers = blocks(2)
            self.layers = Checkpointed(layers=layers) if checkpoints else layers
            self.head = Head(loss)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.head(self.layers(x), target)  # type: ignore[no-any-return]

    given = torch.randn(256, 32), torch.zeros(256, dtype=torch.int64)

    def compiled(**options: Any) -> MemoryProfile:
        return trace(torch.compile(Model(**options)), *given, mode="aot")

    profile = compiled()
    found = profile.suggestions()
    (each,) = (one for one in found if "checkpoint each of layers.* (2)" in one.change)
    assert each.profile.figures() == compiled(checkpoints=True).figures()
    assert each.profile.retained < profile.retained
    (loss,) = (one for one in found if "in 8 chunks" in one.change)
    assert loss.profile.peak == compiled(loss="in 8 chunks").peak < profile.peak


def test_what_has_no_step_has_no_suggestions(tmp_path: Path) -> None:
    trace(blocks(), X).save(tmp_path / "profile.json")
    with pytest.raises(UsageError, match="no step"):
        MemoryProfile.load(tmp_path / "profile.json").suggestions()
    with pytest.raises(UsageError):
        advise(blocks(), X, budget="many")


def test_command(tmp_path: Path, command: Any) -> None:
    file = tmp_path / "step.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    assert torch.cuda.get_device_name() == 'Tesla T4'\n"
        "    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()\n"
        "    return model, torch.randn(1, 256, device='cuda')\n"
        "def wrong():\n"
        "    return nn.Linear(3, 3), torch.ones(2, 4)\n"
    )
    arguments = ["advise", f"{file}:build", "--optimizer", "AdamW", "--gpu", "t4"]
    told = command(*arguments, "--budget", "1 MiB")
    assert "foreach=False in the optimizer" in told
    assert re.search(r"^cuda \(t4\): the peak is \S+ MiB, the budget 1.00 MiB$", told, re.MULTILINE)
    assert told.endswith("none of these is enough\n")
    assert main(["advise", f"{file}:missing"]) == main(["advise", "nothing"]) == 2
    assert "NoSuch" in command(*arguments, "--optimizer", "NoSuch", status=2)
    assert main([*arguments, "--optimizer", "Optimizer"]) == 2
    told = command("advise", f"{file}:wrong", status=2)
    assert "mat1 and mat2 shapes cannot be multiplied (2x4 and 3x3)" in told
    assert str(Path(pytest_torchmem.__file__).parent) not in told
