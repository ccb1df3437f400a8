"""Transformers: decoders, encoders, both, on images and on sound."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.truth.networks.registry import network


@dataclass(frozen=True)
class Plan:
    """How a transformer is made."""

    width: int
    heads: int
    depth: int
    groups: int = 0
    """Heads of keys and values, 0 for as many as of queries."""
    norm: str = "layer"
    wide: str = "gelu"
    eager: bool = False
    """Attention written out."""
    causal: bool = True
    rotary: bool = False
    query_norm: bool = False
    dropout: float = 0.0
    post_norm: bool = False
    bias: bool = True
    relative: bool = False
    cap: float = 0.0
    checkpointed: bool = False
    memory: bool = False
    """Every block looks at a second sequence, too."""


def norm(plan: Plan, width: int) -> nn.Module:
    """Return a norm over the last dimension."""
    return nn.RMSNorm(width) if plan.norm == "rms" else nn.LayerNorm(width)


class Attention(nn.Module):
    """Attention of many heads, by torch's kernels or written out."""

    def __init__(self, plan: Plan, causal: bool) -> None:
        super().__init__()
        self.plan, self.causal = plan, causal
        size = plan.width // plan.heads
        groups = plan.groups or plan.heads
        self.shapes = (plan.heads, size), (groups, size)
        self.query = nn.Linear(plan.width, plan.heads * size, bias=plan.bias)
        self.both = nn.Linear(plan.width, 2 * groups * size, bias=plan.bias)
        self.out = nn.Linear(plan.heads * size, plan.width, bias=plan.bias)
        self.query_norm = nn.RMSNorm(size) if plan.query_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(size) if plan.query_norm else nn.Identity()
        self.distances = nn.Embedding(64, plan.heads) if plan.relative else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return what ``x`` finds in ``memory``, or in itself."""
        (heads, size), (groups, _) = self.shapes
        query = self.query(x).unflatten(-1, (heads, size)).transpose(1, 2)
        pair = self.both(x if memory is None else memory).unflatten(-1, (2, groups, size))
        key, value = (part.transpose(1, 2) for part in pair.unbind(-3))
        query, key = self.query_norm(query), self.key_norm(key)
        if self.plan.rotary:
            query, key = rotated(query), rotated(key)
        if self.plan.eager or self.distances is not None or self.plan.cap:
            found = self.written_out(query, key, value)
        else:
            found = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.plan.dropout if self.training else 0.0,
                is_causal=self.causal,
                enable_gqa=heads != groups,
            )
        return self.out(found.transpose(1, 2).flatten(-2))

    def written_out(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention, operator by operator."""
        ratio = query.shape[1] // key.shape[1]
        if ratio > 1:
            key, value = (part.repeat_interleave(ratio, 1) for part in (key, value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        if self.plan.cap:
            scores = self.plan.cap * torch.tanh(scores / self.plan.cap)
        first, second = scores.shape[-2:]
        if self.distances is not None:
            ahead = torch.arange(second, device=scores.device)
            behind = torch.arange(first, device=scores.device)
            buckets = (ahead[None, :] - behind[:, None]).clamp(-32, 31) + 32
            scores = scores + self.distances(buckets).permute(2, 0, 1)
        if self.causal:
            future = torch.ones(first, second, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        weights = functional.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        weights = functional.dropout(weights, self.plan.dropout, self.training)
        return torch.matmul(weights, value)


def rotated(x: Tensor) -> Tensor:
    """Return ``x`` turned by its position."""
    half = x.shape[-1] // 2
    powers = torch.arange(half, device=x.device, dtype=torch.float32) / half
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, 10_000.0**-powers)
    cos = torch.cat([angles.cos()] * 2, -1).to(x.dtype)
    sin = torch.cat([angles.sin()] * 2, -1).to(x.dtype)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


class Gated(nn.Module):
    """A perceptron with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def perceptron(plan: Plan) -> nn.Module:
    """Return what follows attention."""
    if plan.wide == "gated":
        return Gated(plan.width, plan.width * 8 // 3 // 16 * 16)
    act = nn.ReLU(inplace=True) if plan.wide == "relu" else nn.GELU(approximate="tanh")
    if plan.wide == "gelu-exact":
        act = nn.GELU()
    wide = 4 * plan.width
    return nn.Sequential(
        nn.Linear(plan.width, wide), act, nn.Linear(wide, plan.width), nn.Dropout(plan.dropout)
    )


class Block(nn.Module):
    """Attention and a perceptron, each beside a shortcut."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.attention = Attention(plan, plan.causal)
        self.perceptron = perceptron(plan)
        self.norms = nn.ModuleList(norm(plan, plan.width) for _ in range(3))
        self.crossing = Attention(plan, False) if plan.memory else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        first, second, third = self.norms
        if self.plan.post_norm:
            x = first(x + self.attention(x))
            return second(x + self.perceptron(x))
        x = x + self.attention(first(x))
        if self.crossing is not None:
            x = x + self.crossing(third(x), memory)
        return x + self.perceptron(second(x))


class Stack(nn.Module):
    """Blocks, perhaps computed again in backward."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.blocks = nn.ModuleList(Block(plan) for _ in range(plan.depth))
        self.norm = norm(plan, plan.width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            if self.plan.checkpointed and self.training:
                x = checkpoint(block, x, memory, use_reentrant=False)
            else:
                x = block(x, memory)
        return self.norm(x)


class LanguageModel(nn.Module):
    """Token and position embeddings, blocks, and scores by the same embeddings or others."""

    def __init__(self, plan: Plan, vocabulary: int, length: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, plan.width)
        self.positions = None if plan.rotary else nn.Embedding(length, plan.width)
        self.stack = Stack(plan)
        self.scores = nn.Linear(plan.width, vocabulary, bias=False)
        if tied:
            self.scores.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before."""
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        scores = self.scores(self.stack(x))
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def tokens(batch: int, length: int, vocabulary: int, **_: Any) -> tuple[Tensor, ...]:
    """Return int64[batch, length]."""
    return (torch.randint(0, vocabulary, (batch, length)),)


_TINY = {"batch": 2, "length": 8, "vocabulary": 32, "width": 16, "heads": 2, "depth": 2}


def text(
    batch: int, length: int, vocabulary: int, width: int, heads: int, depth: int
) -> dict[str, Any]:
    """Return the sizes of a language model."""
    sizes = (batch, length, vocabulary, width, heads, depth)
    return dict(zip(_TINY, sizes, strict=True))


def language_model(
    batch: int, length: int, vocabulary: int, tied: bool = True, **plan: Any
) -> nn.Module:
    """Return a language model."""
    return LanguageModel(Plan(**plan), vocabulary, length, tied)


_LLAMA = {"norm": "rms", "wide": "gated", "rotary": True, "bias": False, "tied": False}
_T5 = {"relative": True, "norm": "rms", "wide": "relu", "bias": False}
_BERT = {"causal": False, "post_norm": True}
for _name, _sizes, _options in (
    ("gpt2", text(8, 1024, 50257, 768, 12, 6), {}),
    ("gpt2-dropout", text(8, 1024, 50257, 768, 12, 6), {"dropout": 0.1}),
    ("gpt2-eager", text(4, 1024, 50257, 768, 12, 6), {"eager": True}),
    ("gpt2-eager-dropout", text(4, 1024, 50257, 768, 12, 6), {"eager": True, "dropout": 0.1}),
    ("gpt2-checkpointed", text(8, 1024, 50257, 768, 12, 12), {"checkpointed": True}),
    ("gpt2-wide", text(4, 1024, 50257, 1600, 25, 4), {}),
    ("gpt2-short", text(32, 256, 50257, 768, 12, 6), {}),
    ("llama", text(2, 2048, 32000, 1024, 16, 8), _LLAMA),
    ("llama-grouped", text(2, 2048, 32000, 1024, 16, 8), {**_LLAMA, "groups": 4}),
    ("llama-eager", text(2, 1024, 32000, 1024, 16, 8), {**_LLAMA, "groups": 4, "eager": True}),
    ("llama-long", text(1, 8192, 32000, 1024, 8, 4), _LLAMA),
    ("llama-checkpointed", text(2, 2048, 32000, 1024, 16, 8), {**_LLAMA, "checkpointed": True}),
    ("qwen", text(2, 2048, 32000, 1024, 16, 6), {**_LLAMA, "groups": 8, "query_norm": True}),
    ("gemma-capped", text(2, 1024, 32000, 768, 12, 6), {**_LLAMA, "groups": 4, "cap": 50.0}),
    ("large-vocabulary", text(4, 1024, 128_000, 512, 8, 2), _LLAMA),
    ("bert", text(16, 512, 30522, 768, 12, 6), {**_BERT, "wide": "gelu-exact"}),
    ("bert-dropout", text(16, 512, 30522, 768, 12, 6), {**_BERT, "dropout": 0.1}),
    ("bert-eager", text(8, 512, 30522, 768, 12, 6), {**_BERT, "eager": True}),
    ("relative-positions", text(8, 512, 32000, 512, 8, 6), {**_T5, "causal": False}),
):
    _few = {"groups": 1} if "groups" in _options else {}
    network(f"transformer/{_name}", tokens, {**_sizes, **_options}, {**_TINY, **_few})(
        language_model
    )


class Translator(nn.Module):
    """An encoder, and a decoder that looks at what it gives."""

    def __init__(self, plan: dict[str, Any], vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, plan["width"])
        self.encoder = Stack(Plan(**plan, causal=False))
        self.decoder = Stack(Plan(**plan, memory=True))
        self.scores = nn.Linear(plan["width"], vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores of the second half, given the first."""
        source, target = ids.chunk(2, 1)
        memory = self.encoder(self.tokens(source))
        return self.scores(self.decoder(self.tokens(target), memory))


@network("transformer/translator", tokens, text(16, 512, 32000, 512, 8, 6), _TINY)
@network(
    "transformer/translator-relative", tokens, {**text(8, 1024, 32000, 512, 8, 6), **_T5}, _TINY
)
def translator(batch: int, length: int, vocabulary: int, **plan: Any) -> nn.Module:
    """Return a translator."""
    return Translator(plan, vocabulary)


def vectors(batch: int, length: int, width: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, length, width]."""
    return (torch.randn(batch, length, width),)


_TORCH = {"batch": 8, "length": 512, "width": 768, "heads": 12, "depth": 6}
_TORCH_TINY = {"batch": 2, "length": 8, "width": 16, "heads": 2, "depth": 2}


_NORM_FIRST = {**_TORCH, "norm_first": True, "activation": "gelu"}


@network("transformer/torch-encoder", vectors, _TORCH, _TORCH_TINY)
@network("transformer/torch-encoder-norm-first", vectors, _NORM_FIRST, _TORCH_TINY)
def torch_encoder(
    width: int, heads: int, depth: int, batch: int, length: int, **options: Any
) -> nn.Module:
    """Return torch's own encoder."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, **options)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class Both(nn.Module):
    """Torch's own transformer, on one sequence twice."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.inner = nn.Transformer(width, heads, depth, depth, 4 * width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


@network("transformer/torch-both", vectors, {**_TORCH, "depth": 3}, _TORCH_TINY)
def torch_both(width: int, heads: int, depth: int, **_: Any) -> nn.Module:
    """Return torch's own encoder and decoder."""
    return Both(width, heads, depth)


class Vision(nn.Module):
    """Patches of an image, blocks, and a classifier."""

    def __init__(self, plan: Plan, side: int, patch: int, window: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, plan.width, patch, patch)
        self.window = window
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2, plan.width))
        self.stack = Stack(plan)
        self.classes = nn.Linear(plan.width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.patches(x)
        x = grid.flatten(2).transpose(1, 2) + self.places
        if self.window:
            side, step, width = grid.shape[-1], self.window, x.shape[-1]
            x = x.view(-1, side // step, step, side // step, step, width)
            x = x.transpose(2, 3).reshape(-1, step * step, width)
            x = self.stack(x).view(grid.shape[0], -1, width)
        else:
            x = self.stack(x)
        return self.classes(x.mean(1))


def images(batch: int, side: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, 3, side, side]."""
    return (torch.randn(batch, 3, side, side),)


def picture(
    batch: int, side: int, patch: int, width: int, heads: int, depth: int
) -> dict[str, Any]:
    """Return the sizes of a vision transformer."""
    names = ("batch", "side", "patch", "width", "heads", "depth")
    return dict(zip(names, (batch, side, patch, width, heads, depth), strict=True))


_VISION_TINY = picture(2, 16, 4, 16, 2, 2)
_DROPOUT = {**picture(32, 224, 16, 768, 12, 6), "dropout": 0.1}
_WINDOWS = {**picture(32, 224, 4, 128, 4, 6), "window": 7}


@network("transformer/vit-small", images, picture(64, 224, 16, 384, 6, 12), _VISION_TINY)
@network("transformer/vit-base", images, picture(32, 224, 16, 768, 12, 12), _VISION_TINY)
@network("transformer/vit-large", images, picture(8, 224, 16, 1024, 16, 24), _VISION_TINY)
@network("transformer/vit-base-dropout", images, _DROPOUT, _VISION_TINY)
@network("transformer/vit-many-patches", images, picture(4, 512, 8, 384, 6, 6), _VISION_TINY)
@network("transformer/windows", images, _WINDOWS, {**_VISION_TINY, "window": 2})
def vision(side: int, patch: int, batch: int, window: int = 0, **plan: Any) -> nn.Module:
    """Return a vision transformer."""
    return Vision(Plan(**plan, causal=False), side, patch, window)


class Mixer(nn.Module):
    """Perceptrons over places and over channels, in turn."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.across, self.along = (
            nn.Sequential(nn.Linear(n, wide), nn.GELU(), nn.Linear(wide, n))
            for n, wide in ((places, width // 2), (width, 4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norms[1](x))


class Flattened(nn.Module):
    """Places of a grid as a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, places, channels]."""
        return x.flatten(2).transpose(1, 2)


@network("transformer/mixer", images, picture(32, 224, 16, 768, 12, 12), _VISION_TINY)
def mixer(side: int, patch: int, width: int, depth: int, **_: Any) -> nn.Module:
    """Return a network of perceptrons on patches."""
    layers = (Mixer((side // patch) ** 2, width) for _ in range(depth))
    return nn.Sequential(
        nn.Conv2d(3, width, patch, patch), Flattened(), *layers, nn.Linear(width, 1000)
    )


class Speech(nn.Module):
    """Convolutions over a spectrogram, then blocks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, plan.width, 3, padding=1)
        self.second = nn.Conv1d(plan.width, plan.width, 3, 2, 1)
        self.stack = Stack(plan)

    def forward(self, x: Tensor) -> Tensor:
        """Return a vector for every second frame."""
        x = functional.gelu(self.second(functional.gelu(self.first(x))))
        return self.stack(x.transpose(1, 2))


def spectrograms(batch: int, length: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, 80, length]."""
    return (torch.randn(batch, 80, length),)


_SPEECH = {**_TORCH, "length": 3000, "width": 512, "heads": 8, "batch": 4}


@network("transformer/speech", spectrograms, _SPEECH, _TORCH_TINY)
def speech(batch: int, length: int, **plan: Any) -> nn.Module:
    """Return an encoder of speech."""
    return Speech(Plan(**plan, causal=False))
