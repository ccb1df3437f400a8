"""State that an optimizer loads is its state, wherever it was made."""

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import pytest_torchmem as torchmem


def train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    model(torch.randn(4, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def through_a_file(value: Any, device: str) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sharded", [False, True])
def test_loaded_state_of_an_optimizer_is_its_state(device: str, sharded: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model: nn.Module = nn.Linear(64, 64, bias=False, device=device)
        model = fully_shard(model) if sharded else model
        return model, torch.optim.AdamW(model.parameters())

    def step() -> None:
        if sharded:
            torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        model, optimizer = build()
        train(model, optimizer, device)
        resumed, other = build()
        if sharded:
            state = get_optimizer_state_dict(model, optimizer)
            set_optimizer_state_dict(resumed, other, through_a_file(state, device))
        else:
            other.load_state_dict(through_a_file(optimizer.state_dict(), device))
        del model, optimizer
        train(resumed, other, device)
        torch.empty(1_000_000, device=device)

    profile = torchmem.trace(step, device=device, world_size=2 if sharded else None)
    assert profile.by_kind()["optimizer state"] >= 2 * 4 * 64 * 64 // (2 if sharded else 1)
