"""Mistral 7B v0.1 as ``transformers`` 4.41 had it, with attention in one kernel.

In bfloat16, from embedded words to logits in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.truth.published.selection import Norm

WIDTH, INNER, LAYERS, HEADS, KEYS, HEAD, VOCABULARY = 4096, 14_336, 32, 32, 8, 128, 32_000
_POSITIONS = 32_768


class RootNorm(Norm):
    """Root mean square normalisation in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, in its type."""
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-5)
        return self.weight * x.to(dtype)


class Rotary(nn.Module):
    """Tables of rotary positions; every layer has its own."""

    frequencies: Tensor
    cosines: Tensor
    sines: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (
            ("frequencies", (HEAD // 2,)),
            ("cosines", (_POSITIONS, HEAD)),
            ("sines", (_POSITIONS, HEAD)),
        ):
            self.register_buffer(name, torch.empty(shape), persistent=False)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(query.shape[-2], device=query.device).unsqueeze(0)
        cosines = self.cosines[: query.shape[-2]][positions].unsqueeze(1)
        sines = self.sines[: query.shape[-2]][positions].unsqueeze(1)
        return _rotated(query, cosines, sines), _rotated(key, cosines, sines)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return (x * cosines) + (torch.cat((-second, first), dim=-1) * sines)


class Attention(nn.Module):
    """Causal attention with grouped queries; [batch, sequence, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEYS * HEAD, bias=False)
        self.outer, self.rotary = nn.Linear(WIDTH, WIDTH, bias=False), Rotary()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, HEADS, HEAD).transpose(1, 2)
        key = self.key(x).view(batch, length, KEYS, HEAD).transpose(1, 2)
        value = self.value(x).view(batch, length, KEYS, HEAD).transpose(1, 2)
        query, key = self.rotary(query, key)
        key, value = _repeated(key), _repeated(value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        outputs: Tensor = self.outer(mixed)
        return outputs


def _repeated(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    shape = (batch, heads, HEADS // KEYS, length, width)
    return x[:, :, None].expand(shape).reshape(batch, HEADS, length, width)


class Gated(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, sequence, width]."""
        outputs: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return outputs


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gated = Attention(), Gated()
        self.first, self.second = RootNorm(WIDTH), RootNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, sequence, width]."""
        x = x + self.attention(self.first(x))
        outputs: Tensor = x + self.gated(self.second(x))
        return outputs


class Mistral(nn.Module):
    """Embedded words float32[batch, sequence, width] to logits [batch, vocabulary, sequence]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)  # takes no part, and has its memory
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = RootNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(torch.bfloat16)
        for module in self.modules():
            if isinstance(module, Rotary):
                module.frequencies = module.frequencies.to(torch.float32)

    def forward(self, embedded: Tensor) -> Tensor:
        x = self.norm(self.layers(embedded.to(torch.bfloat16)))
        logits: Tensor = self.head(x)
        return logits.float().permute(0, 2, 1)
