"""Recurrent networks: cuDNN's layers, cells in a loop, and a translator with attention."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.truth.networks.registry import network


class Sequences(nn.Module):
    """A recurrent layer, and a linear one on what it gives at each time."""

    def __init__(self, layer: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.layer, self.classes = layer, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the classes at each time."""
        return self.classes(self.layer(x)[0])


def sequences(
    batch: int, length: int, inner: int, batch_first: bool = False, **_: Any
) -> tuple[Tensor, ...]:
    """Return float32[length, batch, inner], or the batch first."""
    sizes = (batch, length) if batch_first else (length, batch)
    return (torch.randn(*sizes, inner),)


_FULL = {"batch": 64, "length": 256, "inner": 512, "width": 1024, "classes": 1000}
_TINY = {"batch": 2, "length": 5, "inner": 6, "width": 8, "classes": 4}


def layers(kind: Any, inner: int, width: int, classes: int, **options: Any) -> nn.Module:
    """Return a recurrent layer with its classifier."""
    for name in ("batch", "length"):
        options.pop(name)
    out = options.get("proj_size") or width
    wide = out * (2 if options.get("bidirectional") else 1)
    return Sequences(kind(inner, width, **options), wide, classes)


_LAYERS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": nn.LSTM},
    "lstm-2": {"kind": nn.LSTM, "num_layers": 2},
    "lstm-2-batch-first": {"kind": nn.LSTM, "num_layers": 2, "batch_first": True},
    "lstm-3-dropout": {"kind": nn.LSTM, "num_layers": 3, "dropout": 0.1},
    "lstm-bidirectional": {"kind": nn.LSTM, "num_layers": 2, "bidirectional": True},
    "lstm-projected": {"kind": nn.LSTM, "num_layers": 2, "proj_size": 256},
    "gru": {"kind": nn.GRU},
    "gru-2": {"kind": nn.GRU, "num_layers": 2},
    "gru-bidirectional": {"kind": nn.GRU, "num_layers": 2, "bidirectional": True, "dropout": 0.1},
    "rnn-tanh": {"kind": nn.RNN, "num_layers": 2},
    "rnn-relu": {"kind": nn.RNN, "nonlinearity": "relu"},
}
for _name, _options in _LAYERS.items():
    _fewer = {**_TINY, "proj_size": 4} if "proj_size" in _options else _TINY
    network(f"recurrent/{_name}", sequences, {**_FULL, **_options}, _fewer)(layers)


class Unrolled(nn.Module):
    """A cell, called once per time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for item in x.unbind(0):
            state = self.cell(item, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


@network("recurrent/lstm-cell", sequences, {**_FULL, "length": 64, "kind": nn.LSTMCell}, _TINY)
@network("recurrent/gru-cell", sequences, {**_FULL, "length": 64, "kind": nn.GRUCell}, _TINY)
def cells(kind: Any, inner: int, width: int, **_: Any) -> nn.Module:
    """Return a cell in a loop."""
    return Unrolled(kind(inner, width))


class LanguageModel(nn.Module):
    """Embeddings, an LSTM, and scores for a vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.scores = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before."""
        hidden, _ = self.layers(self.embedding(ids[:, :-1]))
        scores = self.scores(hidden)
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def tokens(batch: int, length: int, vocabulary: int, **_: Any) -> tuple[Tensor, ...]:
    """Return int64[batch, length]."""
    return (torch.randint(0, vocabulary, (batch, length)),)


_TEXT = {"batch": 32, "length": 128, "vocabulary": 20_000, "width": 650}
_WORDS = {"batch": 2, "length": 5, "vocabulary": 20, "width": 8}


@network("recurrent/language-model", tokens, _TEXT, _WORDS)
def language_model(vocabulary: int, width: int, **_: Any) -> nn.Module:
    """Return a language model."""
    return LanguageModel(vocabulary, width)


class Translator(nn.Module):
    """Two GRUs, the second with attention to the first."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(2 * width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores for each token."""
        memory, _ = self.encoder(self.embedding(ids))
        hidden, _ = self.decoder(self.embedding(ids))
        weights = torch.softmax(torch.bmm(hidden, memory.transpose(1, 2)), -1)
        return self.scores(torch.cat([hidden, torch.bmm(weights, memory)], -1))


@network("recurrent/translator", tokens, {**_TEXT, "vocabulary": 16_000, "width": 512}, _WORDS)
def translator(vocabulary: int, width: int, **_: Any) -> nn.Module:
    """Return a translator."""
    return Translator(vocabulary, width)
