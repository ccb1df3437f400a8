"""ViT-L/16 as ``rasbt/pytorch-memory-optim`` fine-tunes it, on images of 224 by 224 in ten classes.

The model is torchvision's (``vit_l_16``), its attention what ``torch.nn.MultiheadAttention`` makes
of it (``torch.nn.functional.multi_head_attention_forward``). It was recorded under a torch of June
2023, which did two things differently that decide the peaks: attention in flash's kernel gave its
result another order in memory, so that the projection behind it copied it, and Adam had a second
temporary of all parameters. With ``former`` both are as they were then.
"""

from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.truth.published.programs import Program

WIDTH, INNER, LAYERS, HEADS, PATCH, SIDE, CLASSES = 1024, 4096, 24, 16, 16, 224, 10
_VALIDATION = 5000


@dataclass(frozen=True, slots=True)
class Setting:
    """One of the scripts."""

    batch: int = 64
    precision: str = "float32"
    """``float32``, ``float16 mixed`` (autocast and a scaled loss) or ``bfloat16`` throughout."""
    accumulated: int = 1
    """Batches for each step of the optimizer."""
    adam: bool = True
    """Adam, and not SGD."""


class Attention(nn.Module):
    """``torch.nn.MultiheadAttention``, operator by operator; [batch, sequence, width]."""

    def __init__(self, former: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(3 * WIDTH))
        self.outer, self.former = nn.Linear(WIDTH, WIDTH), former

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = x.transpose(1, 0)
        inner = F.linear(x, self.weight, self.bias).unflatten(-1, (3, WIDTH))
        inner = inner.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        query, key, value = (
            part.view(length, batch * HEADS, -1).transpose(0, 1).view(batch, HEADS, length, -1)
            for part in inner
        )
        mixed: Tensor = F.scaled_dot_product_attention(query, key, value)
        if self.former and mixed.dtype != torch.float32:
            # [batch, sequence, heads, width] in memory: attention.cu,
            # _scaled_dot_product_flash_attention_cuda, until flash attention 2
            mixed = mixed.transpose(1, 2).contiguous().transpose(1, 2)
        mixed = mixed.permute(2, 0, 1, 3).contiguous().view(batch * length, WIDTH)
        mixed = self.outer(mixed)
        return mixed.view(length, batch, WIDTH).transpose(1, 0)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a shortcut."""

    def __init__(self, former: bool) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH, eps=1e-6), Attention(former)
        self.second = nn.LayerNorm(WIDTH, eps=1e-6)
        self.feed = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return [batch, sequence, width]."""
        x = self.first(inputs)
        x = self.attention(x)
        x = x + inputs
        y = self.second(x)
        y = self.feed(y)
        outputs: Tensor = x + y
        return outputs


class Model(nn.Module):
    """Images [batch, 3, side, side] to logits [batch, classes]."""

    def __init__(self, former: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        places = (SIDE // PATCH) ** 2 + 1
        self.places = nn.Parameter(torch.empty(1, places, WIDTH))
        self.blocks = nn.Sequential(*(Block(former) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        x = x.reshape(len(images), WIDTH, -1).permute(0, 2, 1)
        x = torch.cat((self.token.expand(len(images), -1, -1), x), dim=1)
        x = self._encoded(x)  # what goes in is alive meanwhile, as in torchvision's modules
        x = x[:, 0]
        logits: Tensor = self.head(x)
        return logits

    def _encoded(self, x: Tensor) -> Tensor:
        x = x + self.places
        encoded: Tensor = self.norm(self.blocks(x))
        return encoded


class FormerAdam(torch.optim.Optimizer):
    """Adam, all parameters at once, as torch/optim/adam.py had it until August 2023."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Take one step."""
        parameters = [one for one in self.param_groups[0]["params"] if one.grad is not None]
        for one in parameters:
            if not self.state[one]:
                self.state[one] = {"mean": torch.zeros_like(one), "square": torch.zeros_like(one)}
        gradients = [one.grad for one in parameters]
        means = [self.state[one]["mean"] for one in parameters]
        squares = [self.state[one]["square"] for one in parameters]
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, 0.9)
        divisors = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, means, divisors, -5e-5)


def fine_tuning(setting: Setting, former: bool = False) -> Program:
    """Return a program: twice as many steps as gradients are accumulated, and an evaluation."""

    def program() -> None:
        model = Model(former)
        if setting.precision == "bfloat16":
            model.to(torch.bfloat16)
        model.to("cuda")
        optimizer = _optimizer(setting, model, former)
        mixed = setting.precision == "float16 mixed"
        scaler = torch.amp.GradScaler("cuda", enabled=mixed)
        for index in count():
            images, labels = _batch(setting.batch)
            logits = _forward(setting, model, images)
            loss = F.cross_entropy(logits, labels) / setting.accumulated
            if setting.accumulated == 1:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            if index % setting.accumulated == 0:
                scaler.step(optimizer)
                scaler.update()
                if setting.accumulated > 1:
                    optimizer.zero_grad()
            if index == 2 * setting.accumulated:
                break
        model.eval()
        with torch.no_grad():
            for number in (setting.batch, setting.batch, _VALIDATION % setting.batch):
                if number:
                    images, labels = _batch(number)
                    _forward(setting, model, images)

    return program


def _optimizer(setting: Setting, model: Model, former: bool) -> torch.optim.Optimizer:
    if not setting.adam:
        return torch.optim.SGD(model.parameters(), lr=0.01)
    if former:
        return FormerAdam(model.parameters(), {})
    return torch.optim.Adam(model.parameters(), lr=5e-5)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    images, labels = torch.empty(number, 3, SIDE, SIDE), torch.zeros(number, dtype=torch.long)
    return images.to("cuda"), labels.to("cuda")


def _forward(setting: Setting, model: Model, images: Tensor) -> Tensor:
    """Return logits in float32, as ``lightning.Fabric`` does."""
    if setting.precision == "bfloat16":
        images = images.to(torch.bfloat16)
    mixed = setting.precision == "float16 mixed"
    with torch.autocast("cuda", torch.float16, enabled=mixed):
        logits: Tensor = model(images)
    return logits.float()
