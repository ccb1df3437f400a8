"""What a failure says is so: no row stands for another tensor, no module for one that is gone."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pytest_torchmem import trace
from pytest_torchmem.reports.growth import by_cause
from tests.diagnosis.test_planted import told


def merged_weights(wrong: bool, device: str) -> None:
    x = torch.ones(4, 64, 64, device=device)
    for inner, outer in ((64, 128), (128, 64)):
        weight = torch.ones(outer, inner, device=device)
        a = torch.ones(4, inner, device=device, requires_grad=True)
        b = torch.ones(outer, 4, device=device, requires_grad=True)
        x = F.gelu(x @ (weight + b @ a).T if wrong else x @ weight.T + x @ a.T @ b.T)
    x.sum().backward()


def zeros_of_another_call(wrong: bool, device: str) -> None:
    made = torch.ones(256, 64, device=device, requires_grad=True).exp()
    if wrong:
        made = made / torch.zeros(256, 256, device=device).sum(1)[:, None]
    (made + torch.zeros(256, 64, device=device)).sum().backward()


def loss_of_each_number(wrong: bool, device: str) -> None:
    x = torch.ones(512 if wrong else 64, 256, device=device)
    F.mse_loss(x, x, reduction="none" if wrong else "sum").sum()


def layer_in_both_directions(wrong: bool, device: str) -> None:
    layer = nn.LSTM(64, 64, 2, bidirectional=wrong, device=device)
    layer(torch.zeros(100, 4, 64, device=device))[0].sum().backward()


def every_item(wrong: bool, device: str) -> None:
    items, users = nn.Embedding(3000, 32, sparse=True), nn.Linear(32, 32)
    made = users(torch.zeros(256, 32)) @ (items.weight if wrong else items(torch.arange(256))).T
    F.cross_entropy(made, torch.arange(256)).backward()


def gradients_that_stay(wrong: bool, device: str) -> nn.Module:
    model = nn.Linear(256, 256, device=device)
    model(torch.zeros(8, 256, device=device)).sum().backward()
    model.zero_grad(set_to_none=not wrong)
    return model


@pytest.mark.parametrize(
    ("build", "devices", "said", "unsaid"),
    [
        (merged_weights, ["cpu", "cuda"], "float32[64, 128], saved for backward aten::add", "gelu"),
        (zeros_of_another_call, ["cpu", "cuda"], "[256, 256], and div is new", "(was"),
        (loss_of_each_number, ["cuda"], "(was [] in 64.00 KiB)", "(was [])"),
        (layer_in_both_directions, ["cuda"], " (was 18.41 MiB), workspace", "workspace, not alive"),
        (
            gradients_that_stay,
            ["cpu", "cuda"],
            "gradients (2 tensors) are alive at the end",
            "left",
        ),
        (every_item, ["cpu"], "makes float32[256, 3000], and made [256, 256]", "now, and did not"),
    ],
)
def test_what_is_said_of_a_growth_is_so(build, devices, said, unsaid, chance, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text, _ = told(lambda wrong: (partial(build, wrong), None, {}), chance.choice(devices))
    assert (said in (text := " ".join(text.split())), unsaid in text) == (True, False), text


def test_a_cause_in_modules_of_other_numbers_is_the_same() -> None:
    places = [f"aten::mm in Net.{one}.up, net.py:3" for one in ("a.2", "a.*", "a.{0-3}", "b.2")]
    told = [SimpleNamespace(told=[SimpleNamespace(why="why", where=one)]) for one in places]
    assert [*map(len, by_cause(zip(places, told, strict=True)).values())] == [3, 1]


def test_the_backward_of_what_calls_no_operator_in_it_is_not_said_to_be_none() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((x, x)) + 1

    model = nn.Sequential(nn.Embedding(8, 8, sparse=True), Joined(), nn.Linear(8, 8))
    assert "modes" not in trace(model, torch.arange(8), device="cpu").facts
