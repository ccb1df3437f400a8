"""An example that fails on purpose: 2048 became 3072 after the snapshot was written.

Its name keeps it out of a run of all examples: ``pytest examples/regression_example.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 3072


class FeedForward(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, HIDDEN)
        self.narrow = nn.Linear(HIDDEN, 512)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(x)
        hidden = torch.nn.functional.gelu(hidden)
        return self.narrow(hidden)


def test_feed_forward(torchmem):
    torchmem.check(FeedForward(), torch.randn(4096, 512))
