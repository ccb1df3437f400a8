"""A recurrent tagger over sequences of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Tagger(nn.Module):
    """Embeds tokens, runs a two-layer LSTM in both directions, and tags every token."""

    def __init__(self, vocabulary: int = 20_000, tags: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 256)
        self.recurrent = nn.LSTM(256, 256, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(512, tags)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        hidden, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return self.head(hidden)


def test_training_step(torchmem):
    tokens = torch.randint(0, 20_000, (16, 100))
    lengths = torch.linspace(20, 100, 16).long()
    torchmem.check(Tagger(), tokens, lengths, optimizer=torch.optim.Adam)
