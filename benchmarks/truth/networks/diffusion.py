"""Diffusion: U-shaped denoisers with and without attention, transformers, autoencoders."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.truth.networks.registry import network
from benchmarks.truth.networks.transformers import Attention, Plan


def noised(batch: int, side: int, channels: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, channels, side, side] and int64[batch] times."""
    return torch.randn(batch, channels, side, side), torch.randint(0, 1000, (batch,))


def prompted(batch: int, side: int, channels: int, words: int, **_: Any) -> tuple[Tensor, ...]:
    """Return what ``noised`` does, and float32[batch, words, 768] of a text."""
    return (*noised(batch, side, channels), torch.randn(batch, words, 768))


class Times(nn.Module):
    """Sines of the time, and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width)
        )

    def forward(self, times: Tensor) -> Tensor:
        """Return a vector per time, in the weights' type."""
        half = self.width // 2
        powers = torch.arange(half, device=times.device, dtype=torch.float32) / half
        angles = times[:, None].float() * torch.exp(-math.log(10_000.0) * powers)
        waves = torch.cat([angles.cos(), angles.sin()], -1)
        return self.layers(waves.to(next(self.layers.parameters()).dtype))


class Residual(nn.Module):
    """Group norms, SiLU and convolutions, with the time added between."""

    def __init__(self, inner: int, outer: int, times: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(min(32, inner // 4), inner)
        self.first = nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(times, outer) if times else None
        self.second_norm = nn.GroupNorm(min(32, outer // 4), outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1)
        self.shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, times: Tensor | None = None) -> Tensor:
        hidden = self.first(functional.silu(self.first_norm(x)))
        if self.time is not None and times is not None:
            hidden = hidden + self.time(functional.silu(times))[:, :, None, None]
        return self.shortcut(x) + self.second(functional.silu(self.second_norm(hidden)))


class Looking(nn.Module):
    """Attention among places, and to a text if there is one."""

    def __init__(self, width: int, words: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(min(32, width // 4), width)
        plan = Plan(width=width, heads=max(width // 64, 1), depth=1, causal=False)
        self.among = Attention(plan, False)
        self.text = nn.Linear(768, width) if words else None
        self.to_text = Attention(plan, False) if words else None

    def forward(self, x: Tensor, text: Tensor | None) -> Tensor:
        batch, width, high, wide = x.shape
        places = self.norm(x).flatten(2).transpose(1, 2)
        places = places + self.among(places)
        if self.to_text is not None and self.text is not None:
            places = places + self.to_text(places, self.text(text))
        return x + places.transpose(1, 2).reshape(batch, width, high, wide)


class Denoiser(nn.Module):
    """A U-shaped network that knows the time, and perhaps a text."""

    def __init__(
        self, channels: int, base: int, scales: tuple[int, ...], looks: int, words: bool
    ) -> None:
        super().__init__()
        self.times = Times(base)
        self.begin = nn.Conv2d(channels, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.down_looks, self.up_looks = nn.ModuleList(), nn.ModuleList()
        widths = [base * scale for scale in scales]
        inner = base

        def look(level: int, width: int) -> nn.Module:
            return Looking(width, words) if level >= looks else Through()

        for level, width in enumerate(widths):
            self.down.append(Residual(inner, width, 4 * base))
            self.down_looks.append(look(level, width))
            inner = width
        self.middle = Residual(inner, inner, 4 * base)
        for level, width in reversed([*enumerate(widths)]):
            self.up.append(Residual(inner + width, width, 4 * base))
            self.up_looks.append(look(level, width))
            inner = width
        self.end = nn.Sequential(
            nn.GroupNorm(min(32, inner // 4), inner),
            nn.SiLU(),
            nn.Conv2d(inner, channels, 3, padding=1),
        )

    def forward(self, x: Tensor, times: Tensor, text: Tensor | None = None) -> Tensor:
        time = self.times(times)
        x = self.begin(x)
        kept = []
        for index, (layer, look) in enumerate(zip(self.down, self.down_looks, strict=True)):
            x = layer(functional.avg_pool2d(x, 2) if index else x, time)
            x = look(x, text)
            kept.append(x)
        x = self.middle(x, time)
        for index, (layer, look) in enumerate(zip(self.up, self.up_looks, strict=True)):
            x = functional.interpolate(x, scale_factor=2.0) if index else x
            x = look(layer(torch.cat([x, kept.pop()], 1), time), text)
        return self.end(x)


class Through(nn.Module):
    """No attention at this level."""

    def forward(self, x: Tensor, text: Tensor | None) -> Tensor:
        return x


def denoiser(
    channels: int, base: int, scales: tuple[int, ...], looks: int, words: int = 0, **_: Any
) -> nn.Module:
    """Return a denoiser, with a text if it has words."""
    return Denoiser(channels, base, scales, looks, bool(words))


_SIZES = ("batch", "side", "channels", "base", "scales", "looks")
_TINY = {"batch": 2, "side": 8, "base": 16, "scales": (1, 2), "looks": 1}
_TEXT = {**_TINY, "channels": 3, "words": 5}
for _name, _of, _sizes, _tiny in (
    ("unet", noised, (16, 64, 3, 128, (1, 2, 2, 2), 9), {**_TINY, "looks": 9}),
    ("unet-attention", noised, (16, 64, 3, 128, (1, 2, 2, 4), 2), _TINY),
    ("unet-large-images", noised, (2, 256, 3, 64, (1, 2, 4, 8), 3), _TINY),
    ("unet-latent", noised, (8, 64, 4, 192, (1, 2, 4), 1), _TINY),
    ("unet-text", prompted, (4, 64, 4, 320, (1, 2, 4), 0), _TEXT),
    ("unet-text-small", prompted, (16, 32, 4, 192, (1, 2, 2), 1), _TEXT),
):
    _full = dict(zip(_SIZES, _sizes, strict=True)) | ({"words": 77} if _of is prompted else {})
    network(f"diffusion/{_name}", _of, _full, _tiny)(denoiser)


class Modulated(nn.Module):
    """A transformer's block whose norms are set by the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.settings = nn.Sequential(nn.SiLU(), nn.Linear(4 * width, 6 * width))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = Attention(Plan(width=width, heads=heads, depth=1, causal=False), False)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a, b, c, d, e, f = self.settings(time)[:, None].chunk(6, -1)
        x = x + c * self.attention(self.norms[0](x) * (1 + b) + a)
        return x + f * self.perceptron(self.norms[1](x) * (1 + e) + d)


class DiffusionTransformer(nn.Module):
    """Patches, modulated blocks, and patches again."""

    def __init__(self, channels: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.times = Times(width)
        self.patches = nn.Conv2d(channels, width, 2, 2)
        self.blocks = nn.ModuleList(Modulated(width, heads) for _ in range(depth))
        self.end = nn.Linear(width, 4 * channels)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return the noise, as patches."""
        time = self.times(times)
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, time)
        return self.end(x)


_DIT = {"batch": 32, "side": 32, "channels": 4, "width": 384, "heads": 6, "depth": 12}
_DIT_BASE = {"batch": 16, "side": 64, "channels": 4, "width": 768, "heads": 12, "depth": 6}
_DIT_TINY = {"batch": 2, "side": 8, "width": 16, "heads": 2, "depth": 2}


@network("diffusion/transformer-small", noised, _DIT, _DIT_TINY)
@network("diffusion/transformer-base", noised, _DIT_BASE, _DIT_TINY)
def diffusion_transformer(channels: int, width: int, heads: int, depth: int, **_: Any) -> nn.Module:
    """Return a transformer that denoises."""
    return DiffusionTransformer(channels, width, heads, depth)


class Coder(nn.Module):
    """From pixels to a latent image, a sample of it, and back."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, base, 3, padding=1),
            Residual(base, base, 0),
            nn.Conv2d(base, base, 3, 2, 1),
            Residual(base, 2 * base, 0),
            nn.Conv2d(2 * base, 2 * base, 3, 2, 1),
            Residual(2 * base, 4 * base, 0),
            nn.Conv2d(4 * base, 8, 1),
        )
        self.decode = nn.Sequential(
            nn.Conv2d(4, 4 * base, 3, padding=1),
            Residual(4 * base, 4 * base, 0),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(4 * base, 2 * base, 3, padding=1),
            Residual(2 * base, 2 * base, 0),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * base, base, 3, padding=1),
            Residual(base, base, 0),
            nn.Conv2d(base, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.exp(0.5 * spread) * torch.randn_like(mean))


def pictures(batch: int, side: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, 3, side, side]."""
    return (torch.randn(batch, 3, side, side),)


_CODED = {"batch": 2, "side": 16, "base": 16}


@network("diffusion/autoencoder", pictures, {"batch": 4, "side": 256, "base": 96}, _CODED)
def coder(base: int, **_: Any) -> nn.Module:
    """Return a variational autoencoder."""
    return Coder(base)
