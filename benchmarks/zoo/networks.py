"""Networks written here: convolutional, recurrent and attention models in plain ``torch.nn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Network = tuple[nn.Module, tuple[Any, ...]]

NETWORKS: dict[str, Callable[[], Network]] = {}


def network(name: str) -> Callable[[Callable[[], Network]], Callable[[], Network]]:
    """Register a function that returns a model and its positional arguments."""

    def register(make: Callable[[], Network]) -> Callable[[], Network]:
        if name in NETWORKS:
            raise ValueError(f"{name} is already registered")
        NETWORKS[name] = make
        return make

    return register


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = functional.relu(self.first_norm(self.first(x)), inplace=True)
        hidden = self.second_norm(self.second(hidden))
        hidden += self.shortcut(x)
        return functional.relu(hidden, inplace=True)


@network("residual-cnn")
def residual() -> Network:
    """Return a residual network for small images."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(16, 32, 1),
        Residual(32, 48, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )
    return model, (torch.randn(4, 3, 64, 64),)


@network("residual-cnn channels-last")
def residual_channels_last() -> Network:
    """Return the residual network and its input channels-last."""
    model, (x,) = residual()
    layout = torch.channels_last
    return model.to(memory_format=layout), (x.contiguous(memory_format=layout),)  # type: ignore[call-overload]


class Dense(nn.Module):
    """A layer whose output is appended to its input."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inner)
        self.convolution = nn.Conv2d(inner, growth, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return input and new features."""
        return torch.cat([x, self.convolution(functional.relu(self.norm(x)))], 1)


@network("dense-cnn")
def dense() -> Network:
    """Return a densely connected network."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    layers += [Dense(16 + 12 * index, 12) for index in range(4)]
    layers += [nn.AvgPool2d(2), nn.Conv2d(64, 32, 1), nn.Dropout2d(0.1), nn.Flatten(1)]
    return nn.Sequential(*layers, nn.Linear(32 * 16 * 16, 10)), (torch.randn(4, 3, 32, 32),)


class UNet(nn.Module):
    """Down and up again, with skips between the same resolutions."""

    def __init__(self, widths: tuple[int, ...], bilinear: bool) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            self.block(inner, outer) for inner, outer in zip((3, *widths), widths, strict=False)
        )
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(low, high, 1))
            if bilinear
            else nn.ConvTranspose2d(low, high, 2, 2)
            for low, high in pairs
        )
        self.merge = nn.ModuleList(self.block(2 * high, high) for _, high in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        """Return two convolutions with group normalisation."""
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(4, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.LeakyReLU(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a class score for every pixel."""
        skips = []
        for index, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if index else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], 1))
        result: Tensor = self.head(x)
        return result


@network("u-net")
def u_net() -> Network:
    """Return a U-Net with transposed convolutions."""
    return UNet((16, 32, 64), bilinear=False), (torch.randn(2, 3, 64, 64),)


@network("u-net bilinear")
def u_net_bilinear() -> Network:
    """Return a U-Net that interpolates."""
    return UNet((16, 32, 64), bilinear=True), (torch.randn(2, 3, 64, 64),)


@network("separable-cnn")
def separable() -> Network:
    """Return depthwise and pointwise convolutions."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False)]
    for _ in range(3):
        layers += [
            nn.Conv2d(32, 32, 3, 1, 1, groups=32, bias=False),
            nn.BatchNorm2d(32),
            nn.Hardswish(),
            nn.Conv2d(32, 32, 1),
            nn.ReLU6(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(2)), (torch.randn(4, 3, 64, 64),)


@network("plain-cnn")
def plain() -> Network:
    """Return convolutions, pooling and wide linear layers with dropout."""
    model = nn.Sequential(
        nn.Conv2d(3, 24, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 40, 3, dilation=2),
        nn.ELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(40 * 6 * 6, 256),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(256, 10),
    )
    return model, (torch.randn(8, 3, 32, 32),)


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


@network("cnn-3d")
def three_dimensional() -> Network:
    """Return convolutions over volumes."""
    model = nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3),
    )
    return model, (torch.randn(2, 1, 16, 16, 16),)


class Tagger(nn.Module):
    """Embeddings, a recurrent layer and a linear one."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.layer = layer
        self.head = nn.Linear(width, 20)

    def forward(self, ids: Tensor) -> Tensor:
        """Return a score for every tag of every token."""
        hidden, _ = self.layer(self.embedding(ids))
        result: Tensor = self.head(hidden)
        return result


def _tagger(layer: nn.Module, width: int) -> Network:
    return Tagger(layer, width), (torch.randint(0, 500, (4, 40)),)


@network("lstm")
def lstm() -> Network:
    """Return an LSTM tagger."""
    return _tagger(nn.LSTM(32, 48, 2, batch_first=True), 48)


@network("lstm bidirectional")
def lstm_bidirectional() -> Network:
    """Return an LSTM that reads both ways, with dropout between its layers."""
    return _tagger(nn.LSTM(32, 48, 2, batch_first=True, bidirectional=True, dropout=0.2), 96)


@network("lstm projected")
def lstm_projected() -> Network:
    """Return an LSTM with projections."""
    return _tagger(nn.LSTM(32, 48, batch_first=True, proj_size=24), 24)


@network("gru")
def gru() -> Network:
    """Return a GRU tagger."""
    return _tagger(nn.GRU(32, 48, 2, batch_first=True), 48)


@network("rnn")
def rnn() -> Network:
    """Return a plain recurrent tagger."""
    return _tagger(nn.RNN(32, 48, batch_first=True), 48)


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


class Unrolled(nn.Module):
    """A cell called once per time step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all steps."""
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


@network("lstm cell")
def lstm_cell() -> Network:
    """Return an LSTM cell in a loop."""
    return Unrolled(nn.LSTMCell(32, 48)), (torch.randn(4, 12, 32),)


@network("gru cell")
def gru_cell() -> Network:
    """Return a GRU cell in a loop."""
    return Unrolled(nn.GRUCell(32, 48)), (torch.randn(4, 12, 32),)


class Block(nn.Module):
    """Causal self-attention and a gated feed-forward layer, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        batch, length, width = x.shape
        parts = self.projections(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.feed_norm(x)
        result: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return result


class Decoder(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the embeddings."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.positions = nn.Parameter(torch.randn(128, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        scores = self.head(x[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


@network("transformer decoder")
def decoder() -> Network:
    """Return a decoder with tied embeddings."""
    return Decoder(64, 4, 2), (torch.randint(0, 1000, (4, 64)),)


@network("transformer encoder")
def encoder() -> Network:
    """Return torch's own encoder, with dropout."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(4, 48, 64),)


@network("transformer encoder norm-first gelu")
def encoder_norm_first() -> Network:
    """Return torch's own encoder, normalised first and without dropout."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(4, 48, 64),)


@network("transformer both")
def both() -> Network:
    """Return torch's own encoder and decoder."""
    model = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)
    return model, (torch.randn(4, 48, 64), torch.randn(4, 24, 64))


@network("vision transformer")
def vision() -> Network:
    """Return patches of images through an encoder."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)
    patches = nn.Sequential(nn.Conv2d(3, 64, 8, 8), nn.Flatten(2))

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = patches
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.encoder(self.patches(x).transpose(1, 2)).mean(1)
            return result

    return Vision(), (torch.randn(4, 3, 64, 64),)


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
