"""GPT-2 as the book "Build a Large Language Model (From Scratch)" trains it, in its seven variants.

``rasbt/LLMs-from-scratch``, ch05/10_llm-training-speed: ``00_orig.py`` is the first variant, and
``01_opt_single_gpu.py`` without ``torch.compile``, with its first vocabulary and batch, the last.
Those between are not in the repository: its README says what changed from each to the next. How the
causal mask is made where it is no buffer is taken to be the same expression, in the forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.truth.published.programs import Program

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY, BATCH, DROPOUT = 768, 12, 12, 1024, 50_257, 8, 0.1


@dataclass(frozen=True, slots=True)
class Variant:
    """What is not the first variant's."""

    masks_kept: bool = True
    """Every layer keeps a causal mask."""
    fused: bool | None = None
    bfloat16: bool = False
    native: bool = False
    """torch's ``LayerNorm`` and ``GELU``, not an operator at a time."""
    one_kernel: bool = False
    """Attention is ``scaled_dot_product_attention``."""


class OwnAttention(nn.Module):
    """Causal attention with its scores written out; [batch, sequence, width] to the same."""

    mask: Tensor

    def __init__(self, mask_kept: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.mask_kept = mask_kept
        if mask_kept:
            self.register_buffer("mask", _causal(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        key, query, value = self.key(x), self.query(x), self.value(x)
        key = key.view(batch, length, HEADS, -1)
        value = value.view(batch, length, HEADS, -1)
        query = query.view(batch, length, HEADS, -1)
        key, query, value = key.transpose(1, 2), query.transpose(1, 2), value.transpose(1, 2)
        scores = query @ key.transpose(2, 3)
        mask = self.mask if self.mask_kept else _causal(length, x.device)
        mask = mask.bool()[:length, :length]
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        mixed: Tensor = (weights @ value).transpose(1, 2)
        mixed = mixed.reshape(batch, length, WIDTH)
        mixed = self.outer(mixed)
        return mixed  # noqa: RET504 - what a variable holds lives until the function returns


def _causal(length: int, device: torch.device | None = None) -> Tensor:
    return torch.triu(torch.ones(length, length, device=device), diagonal=1)


class OneKernel(nn.Module):
    """Causal attention in one kernel, from one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        inner = self.inner(x)
        inner = inner.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = inner
        dropout = DROPOUT if self.training else 0.0
        mixed: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=None, dropout_p=dropout, is_causal=True
        )
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        mixed = self.outer(mixed)
        return mixed  # noqa: RET504 - as above


class OwnNorm(nn.Module):
    """Layer normalisation, an operator at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normalised = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normalised + self.shift


class OwnGelu(nn.Module):
    """GELU by its approximation, an operator at a time."""

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.attention = OneKernel() if variant.one_kernel else OwnAttention(variant.masks_kept)
        activation = nn.GELU(approximate="tanh") if variant.native else OwnGelu()
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH)
        )
        self.first, self.second = _norm(variant), _norm(variant)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, sequence, width]."""
        shortcut = x
        x = self.first(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + shortcut
        shortcut = x
        x = self.second(x)
        x = self.feed(x)
        x = self.dropout(x)
        x = x + shortcut
        return x  # noqa: RET504 - as above


def _norm(variant: Variant) -> nn.Module:
    return nn.LayerNorm(WIDTH) if variant.native else OwnNorm()


class Model(nn.Module):
    """int64[batch, sequence] to logits [batch, sequence, vocabulary]."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(variant) for _ in range(LAYERS)))
        self.norm, self.head = _norm(variant), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.words(tokens)
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = words + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits: Tensor = self.head(x)
        return logits


def training(variant: Variant, steps: int = 52, every: int = 15, words: int = 50) -> Program:
    """Return an epoch: ``steps`` steps of AdamW, evaluations, and ``words`` generated words.

    Two batches are evaluated after the first step and ``every`` further ones.
    """

    def program() -> None:
        model = Model(variant)
        model.to("cuda")
        if variant.bfloat16:
            model.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=5e-4, weight_decay=0.1, fused=variant.fused
        )
        model.train()
        for index in range(steps):
            optimizer.zero_grad()
            loss = _loss(model)
            loss.backward()
            optimizer.step()
            if index % every == 0:
                _without_training(model, lambda: [_loss(model).item() for _ in range(2)])
        _without_training(model, lambda: _generate(model, words))

    return program


def _loss(model: Model) -> Tensor:
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long).to("cuda")
    targets = torch.zeros(BATCH, CONTEXT, dtype=torch.long).to("cuda")
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss  # noqa: RET504 - as above


def _generate(model: Model, words: int) -> Tensor:
    """Return four words and those that follow; nothing of the earlier ones is kept between."""
    tokens = torch.zeros(1, 4, dtype=torch.long).to("cuda")
    for _ in range(words):
        logits = model(tokens[:, -CONTEXT:])
        logits = logits[:, -1, :]
        following = torch.argmax(logits, dim=-1, keepdim=True)
        tokens = torch.cat((tokens, following), dim=1)
    return tokens.squeeze(0).cpu()


def _without_training(model: Model, what: Callable[[], object]) -> None:
    model.eval()
    with torch.no_grad():
        what()
    model.train()
