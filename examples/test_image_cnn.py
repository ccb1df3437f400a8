"""A residual CNN with batch norm: a snapshot of what its training step needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class ImageClassifier(nn.Module):
    """A small ResNet for 224 x 224 images."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stages = nn.Sequential(
            Residual(64, 64), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2)
        )
        self.head = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


def test_training_step(torchmem):
    torchmem.check(
        ImageClassifier(),
        torch.randn(32, 3, 224, 224),
        loss_fn=lambda logits: nn.functional.cross_entropy(
            logits, logits.new_zeros(32, dtype=torch.long)
        ),
        optimizer=torch.optim.AdamW,
    )


def test_inference(torchmem):
    model = ImageClassifier().eval()
    with torch.no_grad():
        torchmem.check(model, torch.randn(32, 3, 224, 224), backward=False)
