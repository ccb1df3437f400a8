"""Networks in plain ``torch.nn``: the tiny ones of ``benchmarks.truth``, and what these lack."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.truth import networks as recorded

Network = tuple[nn.Module, tuple[Any, ...]]


def _tiny(found: recorded.Network) -> Network:
    sizes = found.sizes(tiny=True)
    return found.make(**sizes), found.inputs(**sizes)


NETWORKS: dict[str, Callable[[], Network]] = {
    name: partial(_tiny, found) for name, found in recorded.NETWORKS.items()
}


def network(name: str) -> Callable[[Callable[[], Network]], Callable[[], Network]]:
    """Register a function that returns a model and its positional arguments."""

    def register(make: Callable[[], Network]) -> Callable[[], Network]:
        if name in NETWORKS:
            raise ValueError(f"{name} is already registered")
        NETWORKS[name] = make
        return make

    return register


@network("cnn/resnet18-channels-last")
def residual_channels_last() -> Network:
    """Return a residual network and its input channels-last."""
    model, (x,) = NETWORKS["cnn/resnet18"]()
    layout = torch.channels_last
    return model.to(memory_format=layout), (x.contiguous(memory_format=layout),)  # type: ignore[call-overload]


@network("cnn-1d")
def one_dimensional() -> Network:
    """Return convolutions along time."""
    model = nn.Sequential(
        nn.Conv1d(8, 32, 7, padding=3),
        nn.BatchNorm1d(32),
        nn.GELU(),
        nn.Conv1d(32, 32, 5, stride=2),
        nn.InstanceNorm1d(32, affine=True),
        nn.ConvTranspose1d(32, 8, 4, 2),
    )
    return model, (torch.randn(4, 8, 256),)


class Packed(nn.Module):
    """An LSTM over sentences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 48, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the outputs, padded."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        hidden, _ = self.layer(packed)
        result: Tensor = nn.utils.rnn.pad_packed_sequence(hidden, batch_first=True)[0]
        return result


@network("lstm packed")
def lstm_packed() -> Network:
    """Return an LSTM over packed sequences."""
    return Packed(), (torch.randn(4, 40, 32), torch.tensor([40, 31, 20, 5]))


@network("perceptron")
def perceptron() -> Network:
    """Return linear layers with activations and batch norm."""
    model = nn.Sequential(
        nn.Linear(100, 200),
        nn.ReLU(),
        nn.BatchNorm1d(200),
        nn.Linear(200, 200),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(200, 10),
        nn.LogSoftmax(1),
    )
    return model, (torch.randn(64, 100),)


@network("embedding bag")
def embedding_bag() -> Network:
    """Return averaged embeddings and a linear layer."""
    model = nn.Sequential(nn.EmbeddingBag(500, 32, mode="mean"), nn.Linear(32, 4))
    return model, (torch.randint(0, 500, (16, 20)),)


@network("autoencoder")
def autoencoder() -> Network:
    """Return strided convolutions, and transposed ones back."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1),
        nn.PReLU(),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.Softplus(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.BatchNorm2d(16),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
        nn.Sigmoid(),
    )
    return model, (torch.randn(4, 3, 32, 32),)
