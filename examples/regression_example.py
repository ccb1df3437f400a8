"""An example that fails on purpose: somebody made a layer wider after the snapshot was written.

Its name keeps it out of a run of all examples: ``pytest examples/regression_example.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 3072  # 2048 when the snapshot was written


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
