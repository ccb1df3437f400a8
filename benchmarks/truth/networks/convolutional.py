"""Convolutional networks: classifiers, segmentation, generators, video and sound."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.truth.networks.registry import network


def images(batch: int, side: int, channels: int = 3, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, channels, side, side]."""
    return (torch.randn(batch, channels, side, side),)


def full(batch: int, side: int = 224, **sizes: Any) -> dict[str, Any]:
    """Return sizes for images as classifiers are trained on."""
    return {"batch": batch, "side": side, **sizes}


def tiny(**sizes: Any) -> dict[str, Any]:
    """Return sizes that a test can afford."""
    return {"batch": 2, "side": 32, **sizes}


def conv_norm(
    inner: int, outer: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU
) -> nn.Sequential:
    """Return a convolution, its batch norm, and an activation in place if there is one."""
    layers: list[nn.Module] = [
        nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outer),
    ]
    return nn.Sequential(*layers, *([act(inplace=True)] if act else []))


def head(width: int, classes: int = 1000) -> nn.Sequential:
    """Return a classifier on pooled features."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


class Shortcut(nn.Module):
    """A body beside a shortcut, and an activation after their sum."""

    def __init__(self, body: nn.Module, shortcut: nn.Module, act: bool = True) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut, act

    def forward(self, x: Tensor) -> Tensor:
        total = self.body(x)
        total += self.shortcut(x)
        return functional.relu(total, inplace=True) if self.act else total


def residual(
    inner: int, outer: int, stride: int, bottleneck: int = 0, groups: int = 1
) -> nn.Module:
    """Return a residual block, of two convolutions or a bottleneck."""
    if bottleneck:
        body = nn.Sequential(
            conv_norm(inner, bottleneck, 1),
            conv_norm(bottleneck, bottleneck, 3, stride, groups),
            conv_norm(bottleneck, outer, 1, act=None),
        )
    else:
        body = nn.Sequential(
            conv_norm(inner, outer, 3, stride), conv_norm(outer, outer, 3, act=None)
        )
    same = inner == outer and stride == 1
    shortcut = nn.Identity() if same else conv_norm(inner, outer, 1, stride, act=None)
    return Shortcut(body, shortcut)


def resnet(
    blocks: tuple[int, ...],
    base: int = 64,
    expand: int = 1,
    groups: int = 1,
    wide: int = 1,
    **_: Any,
) -> nn.Module:
    """Return a residual network; ``expand`` above 1 gives bottlenecks."""
    layers: list[nn.Module] = [conv_norm(3, base, 7, 2), nn.MaxPool2d(3, 2, 1)]
    inner = base
    for stage, count in enumerate(blocks):
        width = base * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            bottleneck = width * wide if expand > 1 else 0
            layers.append(residual(inner, width * expand, stride, bottleneck, groups))
            inner = width * expand
    return nn.Sequential(*layers, head(inner))


_SMALL, _FIFTY = tiny(blocks=(1, 1), base=16), (3, 4, 6, 3)
for _name, _full, _tiny in (
    ("resnet18", full(64, blocks=(2, 2, 2, 2)), {}),
    ("resnet34", full(48, blocks=_FIFTY), {}),
    ("resnet50", full(32, blocks=_FIFTY, expand=4), {}),
    ("resnet101", full(16, blocks=(3, 4, 23, 3), expand=4), {"blocks": (1, 2)}),
    ("resnext50", full(32, blocks=_FIFTY, expand=2, wide=2, groups=32), {"groups": 4, "wide": 1}),
    ("wide-resnet50", full(16, blocks=_FIFTY, expand=4, wide=2), {}),
    ("resnet50-large-images", full(4, 640, blocks=_FIFTY, expand=4), {"side": 48}),
):
    network(f"cnn/{_name}", images, _full, {**_SMALL, **_tiny})(resnet)


def vgg(widths: tuple[int, ...], norm: bool = True, **_: Any) -> nn.Module:
    """Return convolutions and poolings (0), and large linear layers with dropout."""
    layers: list[nn.Module] = []
    inner = 3
    for width in widths:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inner, width, 3, padding=1)]
        layers += [nn.BatchNorm2d(width)] if norm else []
        layers += [nn.ReLU(inplace=True)]
        inner = width
    wide = 8 * inner
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(inner * 49, wide),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(wide, wide),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(wide, 1000),
    )


_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
_VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
_FEW_WIDTHS = tiny(widths=(8, 0, 16))
network("cnn/vgg11", images, full(32, widths=_VGG11, norm=False), _FEW_WIDTHS)(vgg)
network("cnn/vgg16-bn", images, full(16, widths=_VGG16), _FEW_WIDTHS)(vgg)


class Dense(nn.Module):
    """Layers whose outputs are appended to their inputs."""

    def __init__(self, inner: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(count):
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(inner),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(inner, 4 * growth, 1, bias=False),
                    nn.BatchNorm2d(4 * growth),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                )
            )
            inner += growth
        self.width = inner

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


_BLOCKS = (6, 12, 24, 16)


@network(
    "cnn/densenet121", images, full(16, blocks=_BLOCKS, growth=32), tiny(blocks=(2, 2), growth=8)
)
def densenet(blocks: tuple[int, ...], growth: int, **_: Any) -> nn.Module:
    """Return a densely connected network."""
    width = 2 * growth
    layers: list[nn.Module] = [conv_norm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for index, count in enumerate(blocks):
        layers.append(Dense(width, growth, count))
        width += growth * count
        if index < len(blocks) - 1:
            layers += [conv_norm(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, head(width))


class Squeeze(nn.Module):
    """Channels weighted by what their means say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.SiLU(inplace=True),
            nn.Conv2d(width // 4, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


def inverted(
    inner: int, outer: int, expand: int, kernel: int, stride: int, gate: bool, act: Any
) -> nn.Module:
    """Return an inverted bottleneck around a depthwise convolution."""
    wide = inner * expand
    body = nn.Sequential(
        conv_norm(inner, wide, 1, act=act),
        conv_norm(wide, wide, kernel, stride, wide, act),
        *([Squeeze(wide)] if gate else []),
        conv_norm(wide, outer, 1, act=None),
    )
    return Shortcut(body, nn.Identity(), act=False) if stride == 1 and inner == outer else body


def mobile(
    stages: tuple[tuple[int, int, int, int], ...], gate: bool, act: Any = nn.ReLU6, **_: Any
) -> nn.Module:
    """Return a network of inverted bottlenecks; a stage is (width, count, kernel, stride)."""
    layers: list[nn.Module] = [conv_norm(3, 32, 3, 2, act=act)]
    inner = 32
    for width, count, kernel, stride in stages:
        for index in range(count):
            layers.append(inverted(inner, width, 6, kernel, 1 if index else stride, gate, act))
            inner = width
    return nn.Sequential(*layers, conv_norm(inner, 4 * inner, 1, act=act), head(4 * inner))


_MOBILE = (
    (16, 1, 3, 1),
    (24, 2, 3, 2),
    (40, 2, 5, 2),
    (80, 3, 3, 2),
    (112, 3, 5, 1),
    (192, 4, 5, 2),
)
_FEW = tiny(stages=((16, 1, 3, 1), (24, 2, 5, 2)))
for _name, _full, _tiny in (
    ("mobilenet-v2", full(48, stages=_MOBILE, gate=False), {}),
    ("mobilenet-v3", full(48, stages=_MOBILE, gate=True, act=nn.Hardswish), {}),
    ("efficientnet-b0", full(32, stages=_MOBILE, gate=True, act=nn.SiLU), {}),
    (
        "efficientnet-b0-large-images",
        full(8, 480, stages=_MOBILE, gate=True, act=nn.SiLU),
        {"side": 48},
    ),
):
    network(f"cnn/{_name}", images, _full, {**_FEW, **_tiny})(mobile)


class ConvNextBlock(nn.Module):
    """A depthwise convolution of 7 x 7 and a perceptron per pixel, with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        hidden = self.scale * self.narrow(functional.gelu(self.wide(hidden)))
        return x + hidden.permute(0, 3, 1, 2)


_NEXT = full(32, widths=(96, 192, 384, 768), counts=(3, 3, 9, 3))
_NEXT_BASE = full(8, widths=(128, 256, 512, 1024), counts=(3, 3, 27, 3))


@network("cnn/convnext-tiny", images, _NEXT, tiny(widths=(16, 32), counts=(1, 1)))
@network("cnn/convnext-base", images, _NEXT_BASE, tiny(widths=(24, 48), counts=(1, 1)))
def convnext(widths: tuple[int, ...], counts: tuple[int, ...], **_: Any) -> nn.Module:
    """Return a convolutional network in the manner of vision transformers."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), nn.GroupNorm(1, widths[0])]
    for index, (width, count) in enumerate(zip(widths, counts, strict=True)):
        if index:
            layers += [
                nn.GroupNorm(1, widths[index - 1]),
                nn.Conv2d(widths[index - 1], width, 2, 2),
            ]
        layers += [ConvNextBlock(width) for _ in range(count)]
    return nn.Sequential(*layers, head(widths[-1]))


class Branches(nn.Module):
    """Branches side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


@network("cnn/inception", images, full(32, 299, base=64, count=9), tiny(base=8, count=1))
def inception(base: int, count: int, **_: Any) -> nn.Module:
    """Return a network of four branches per layer."""
    layers: list[nn.Module] = [
        conv_norm(3, base, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        conv_norm(base, 4 * base),
    ]
    for index in range(count):
        layers.append(
            Branches(
                conv_norm(4 * base, base, 1),
                nn.Sequential(conv_norm(4 * base, base, 1), conv_norm(base, base)),
                nn.Sequential(conv_norm(4 * base, base, 1), conv_norm(base, base, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(4 * base, base, 1)),
            )
        )
        layers += [nn.MaxPool2d(3, 2, 1)] if index % 3 == 2 else []
    return nn.Sequential(*layers, head(4 * base))


class SegmentationNet(nn.Module):
    """An encoder, a decoder, and what each level of one gives to the other."""

    def __init__(self, base: int, depth: int, transposed: bool, dilation: int = 1) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth)]
        self.down, self.up, self.rise = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inner = 3
        for width in widths:
            self.down.append(nn.Sequential(conv_norm(inner, width), conv_norm(width, width)))
            inner = width
        last = nn.Conv2d(inner, inner, 3, padding=dilation, dilation=dilation)
        self.middle = nn.Sequential(last, nn.ReLU(inplace=True))
        for width in reversed(widths[:-1]):
            rise: nn.Module = nn.ConvTranspose2d(inner, width, 2, 2)
            if not transposed:
                rise = nn.Sequential(
                    nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
                    nn.Conv2d(inner, width, 1),
                )
            self.rise.append(rise)
            self.up.append(nn.Sequential(conv_norm(2 * width, width), conv_norm(width, width)))
            inner = width
        self.classes = nn.Conv2d(inner, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if index else x)
            kept.append(x)
        x = self.middle(kept.pop())
        for rise, layer in zip(self.rise, self.up, strict=True):
            x = layer(torch.cat([rise(x), kept.pop()], 1))
        return self.classes(x)


_UNET, _DILATED = full(4, 256, base=64, depth=5), full(4, 320, base=48, depth=4, dilation=4)


@network("cnn/unet-transposed", images, {**_UNET, "transposed": True}, tiny(base=8, depth=3))
@network("cnn/unet-bilinear", images, _UNET, tiny(base=8, depth=3))
@network("cnn/unet-dilated", images, _DILATED, tiny(base=8, depth=2, dilation=2))
def segmentation(
    base: int, depth: int, transposed: bool = False, dilation: int = 1, **_: Any
) -> nn.Module:
    """Return a U-shaped network."""
    return SegmentationNet(base, depth, transposed, dilation)


def noise(batch: int, latent: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, latent, 1, 1]."""
    return (torch.randn(batch, latent, 1, 1),)


_LATENT = {"batch": 2, "latent": 16, "base": 4}


@network("cnn/dcgan-generator", noise, {"batch": 256, "latent": 128, "base": 64}, _LATENT)
def generator(latent: int, base: int, **_: Any) -> nn.Module:
    """Return transposed convolutions from noise to images of 64 x 64."""
    layers: list[nn.Module] = []
    inner = latent
    for index, width in enumerate((8 * base, 4 * base, 2 * base, base)):
        stride, padding = (1, 0) if not index else (2, 1)
        layers += [nn.ConvTranspose2d(inner, width, 4, stride, padding, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        inner = width
    return nn.Sequential(*layers, nn.ConvTranspose2d(inner, 3, 4, 2, 1), nn.Tanh())


@network("cnn/patch-discriminator", images, full(32, 256, base=64), tiny(base=8))
def discriminator(base: int, **_: Any) -> nn.Module:
    """Return strided convolutions with instance norm."""
    layers: list[nn.Module] = [nn.Conv2d(3, base, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
    for index in range(3):
        inner = base * 2**index
        layers += [nn.Conv2d(inner, 2 * inner, 4, 2, 1), nn.InstanceNorm2d(2 * inner)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(8 * base, 1, 3, 1, 1))


@network("cnn/super-resolution", images, full(16, 96, base=64, count=16), tiny(base=8, count=2))
def super_resolution(base: int, count: int, **_: Any) -> nn.Module:
    """Return residual blocks without norm, and pixels from channels."""

    def block() -> nn.Module:
        body = nn.Sequential(
            nn.Conv2d(base, base, 3, padding=1), nn.PReLU(), nn.Conv2d(base, base, 3, padding=1)
        )
        return Shortcut(body, nn.Identity(), act=False)

    layers = [nn.Conv2d(3, base, 9, padding=4), *(block() for _ in range(count))]
    return nn.Sequential(*layers, nn.Conv2d(base, 12, 3, padding=1), nn.PixelShuffle(2))


def clips(batch: int, side: int, frames: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, 3, frames, side, side]."""
    return (torch.randn(batch, 3, frames, side, side),)


@network(
    "cnn/video-conv3d", clips, full(8, 112, frames=16, base=64), tiny(side=16, frames=4, base=8)
)
def video(base: int, **_: Any) -> nn.Module:
    """Return convolutions over time and space."""
    layers: list[nn.Module] = []
    inner = 3
    for width in (base, 2 * base, 4 * base):
        layers += [nn.Conv3d(inner, width, 3, padding=1, bias=False), nn.BatchNorm3d(width)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool3d((1, 2, 2))]
        inner = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inner, 400))


def waves(batch: int, length: int, **_: Any) -> tuple[Tensor, ...]:
    """Return float32[batch, 1, length]."""
    return (torch.randn(batch, 1, length),)


_WAVES = {"batch": 2, "length": 640, "base": 8}


@network("cnn/sound-conv1d", waves, {"batch": 16, "length": 64000, "base": 64}, _WAVES)
def sound(base: int, **_: Any) -> nn.Module:
    """Return dilated convolutions over a wave."""
    layers: list[nn.Module] = [nn.Conv1d(1, base, 16, 4)]
    for index in range(6):
        layers += [nn.Conv1d(base, base, 3, padding=2**index, dilation=2**index)]
        layers += [nn.BatchNorm1d(base), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(base, 35))
