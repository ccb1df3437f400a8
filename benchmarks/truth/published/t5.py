"""T5 base as ``transformers`` 4.41 had it, without dropout, from embedded words to logits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.truth.published.selection import Norm

WIDTH, INNER, LAYERS, HEADS, VOCABULARY = 768, 3072, 12, 12, 32_128
_BUCKETS, _FARTHEST = 32, 128


class RootNorm(Norm):
    """Root mean square normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x


class Attention(nn.Module):
    """Attention with its scores written out; [batch, sequence, width]."""

    def __init__(self, biased: bool, causal: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.causal = nn.Linear(WIDTH, WIDTH, bias=False), causal
        self.distances = nn.Embedding(_BUCKETS, HEADS) if biased else None

    def forward(self, x: Tensor, other: Tensor, bias: Tensor) -> Tensor:
        """Return what is mixed of ``other``; ``bias`` goes to the scores."""
        query = _heads(self.query(x))
        key, value = _heads(self.key(other)), _heads(self.value(other))
        scores = torch.matmul(query, key.transpose(3, 2))
        scores += bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        mixed = torch.matmul(weights, value)
        mixed = mixed.transpose(1, 2).contiguous().view(x.shape[0], -1, WIDTH)
        outputs: Tensor = self.outer(mixed)
        return outputs

    def bias(self, length: int, mask: Tensor) -> Tensor:
        """Return what goes to the scores of all layers: by distance, and the mask."""
        if self.distances is None:
            return torch.zeros((1, HEADS, length, length), device=mask.device) + mask
        here = torch.arange(length, device=mask.device)
        buckets = _bucket(here[None, :] - here[:, None], self.causal)
        values: Tensor = self.distances(buckets).permute([2, 0, 1]).unsqueeze(0)
        return values + mask


def _heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)


def _bucket(distance: Tensor, causal: bool) -> Tensor:
    """Return int64[length, length], the bucket of each distance."""
    if causal:
        number, buckets = _BUCKETS, torch.zeros_like(distance)
        distance = -torch.min(distance, torch.zeros_like(distance))
    else:
        number = _BUCKETS // 2
        buckets = (distance > 0).to(torch.long) * number
        distance = torch.abs(distance)
    exact = number // 2
    share = torch.log(distance.float() / exact) / math.log(_FARTHEST / exact)
    far = (exact + share * (number - exact)).to(torch.long)
    far = torch.min(far, torch.full_like(far, number - 1))
    return buckets + torch.where(distance < exact, distance, far)


class Layer(nn.Module):
    """Attention to itself, to the encoder if there is one, and feed-forward, after norms."""

    def __init__(self, decoder: bool, first: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(first, decoder), RootNorm(WIDTH)
        if decoder:
            self.across, self.across_norm = Attention(False, True), RootNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, INNER, False), nn.Linear(INNER, WIDTH, False)
        self.last_norm = RootNorm(WIDTH)

    def forward(
        self, x: Tensor, bias: Tensor, encoded: Tensor | None, across: Tensor | None
    ) -> Tensor:
        """Return [batch, sequence, width]."""
        normed = self.norm(x)
        x = x + self.attention(normed, normed, bias)
        if encoded is not None and across is not None:
            x = x + self.across(self.across_norm(x), encoded, across)
        outputs: Tensor = x + self.outer(F.relu(self.inner(self.last_norm(x))))
        return outputs


class Stack(nn.Module):
    """The encoder, or the decoder with attention to what was encoded."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.first = Layer(decoder, True)
        self.further = nn.ModuleList(Layer(decoder, False) for _ in range(LAYERS - 1))
        self.norm = RootNorm(WIDTH)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Return [batch, sequence, width]."""
        batch, length, _ = x.shape
        seen = torch.ones(batch, length, device=x.device)[:, None, None, :]
        mask = seen
        if self.decoder:
            here = torch.arange(length, device=x.device)
            before = here[None, None, :].repeat(batch, length, 1) <= here[None, :, None]
            mask = before.to(seen.dtype)[:, None, :, :] * seen
        bias = self.first.attention.bias(length, (1.0 - mask) * torch.finfo(x.dtype).min)
        across = None
        if encoded is not None:
            across = self.first.across.bias(length, (1.0 - seen) * torch.finfo(x.dtype).min)
        for layer in (self.first, *self.further):
            x = layer(x, bias, encoded, across)
        normed: Tensor = self.norm(x)
        return normed


class T5(nn.Module):
    """Embedded words float32[batch, sequence, width] to logits [batch, vocabulary, sequence]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(False), Stack(True)

    def forward(self, embedded: Tensor) -> Tensor:
        """Return the logits; the words' table is the last layer's, too."""
        x = self.decoder(embedded, self.encoder(embedded))
        logits = F.linear(x * WIDTH**-0.5, self.words.weight)
        return logits.permute(0, 2, 1)
