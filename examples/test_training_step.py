"""A whole training step in the test's own words: no fixture, the body runs on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def make_model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)


@pytest.mark.memory_budget("2.5 GiB", device="cuda", gpu="l4")
def test_two_steps_with_adamw():
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        batch = torch.randn(16, 512, 512, device="cuda")
        loss = model(batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@pytest.mark.memory_budget(forward="1 GiB", retained="900 MiB", device="cuda")
def test_a_checkpointed_forward_keeps_little():
    model = make_model().cuda()
    x = torch.randn(16, 512, 512, device="cuda")
    for layer in model.layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()


def test_own_assertions(torchmem):
    profile = torchmem.trace(make_model(), torch.randn(4, 128, 512), device="cuda", gpu="h100")
    assert profile.retained < profile.backward_peak
    assert profile.by_kind("backward")["gradient"] <= 2 * profile.by_kind()["parameter"]
