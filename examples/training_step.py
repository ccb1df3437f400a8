"""A training step: ``torchmem trace examples/training_step.py:step --gpu h100``."""

from __future__ import annotations

import torch
from torch import nn


def step() -> None:
    """Train a small transformer encoder for one step."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(8, 256, 512, device="cuda")
    labels = torch.randint(10, (8, 256), device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
