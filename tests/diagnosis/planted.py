"""Regressions planted in small models of every kind: what each rule has to recognise.

Each is built as it was and as it is; a comment «here: <name>» marks the line that is to blame.
"""

import copy
import functools
import importlib
import inspect
import io
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.modules import Parts, trained

WIDTH, HEADS, LENGTH, BATCH, WORDS = 32, 4, 64, 4, 200
Step = tuple[Any, tuple[Any, ...] | None, dict[str, Any]]
"""A target, its arguments (None: the device), and the options of its trace."""


@dataclass(frozen=True)
class Planted:
    """A regression, and what the message has to say."""

    name: str
    build: Callable[[bool], Step]
    rule: str
    words: str
    """A part of the sentence that names the cause."""
    module: str
    operator: str
    devices: tuple[str, ...]
    file: str

    @property
    def line(self) -> str:
        """The end of the source line that is to blame."""
        lines = Path(self.file).read_text(encoding="utf-8").splitlines()
        marked = [n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {self.name}")]
        return f"{Path(self.file).name}:{marked[0]}" if marked else ""


PLANTED: list[Planted] = []


def planted(rule, words, module="", operator="aten::", device="cpu", imports="torch"):
    """Register what builds a step or, if it takes the device, is a program; both without one."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        def built(wrong: bool) -> Step:
            importlib.import_module(imports)  # outside of the trace
            return (partial(build, wrong), None, {}) if program else build(wrong)

        program = "device" in inspect.signature(build).parameters
        devices = (device,) if device else ("cpu", "cuda")
        file, name = inspect.getfile(inspect.unwrap(build)), build.__name__
        PLANTED.append(Planted(name, built, rule, words, module, operator, devices, file))
        return build

    return register


class Block(nn.Module):
    """One block of a decoder, with what may be wrong in it."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept: list[Tensor] = []

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if "strided" in self.wrong:
            v = v.transpose(-1, -2).contiguous().transpose(-1, -2)
        if "eager" in self.wrong:
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            return scores @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # here: strided_values

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attend(self.norm(x)).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        hidden = self.act(self.up(x))
        if "float" in self.wrong:
            hidden = hidden.float().square()  # here: widened
            hidden = hidden.to(x.dtype)
        if "kept" in self.wrong:
            self.kept.append(hidden.detach() * 2)
        return x + self.down(hidden) * self.scale


class Wide(nn.Linear):
    """A layer of a program's own."""


class Layers(nn.Sequential):
    """Layers one after the other, of a program's own."""


class Decoder(nn.Module):
    def __init__(self, depth=4, tied=True, recompute=(), wrong=None, words=WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block(**(wrong or {})) for _ in range(depth))
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            recompute = index in self.recompute
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.head(x)


def ids(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def cross_entropy(logits: Tensor) -> Tensor:
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@planted("attention", "attention fell from flash to math", "Decoder.blocks.*", "softmax", "cuda")
def strided_values(wrong: bool) -> Step:
    model = Decoder(wrong={"strided": True} if wrong else None).bfloat16()
    return model, (ids(),), {}


@planted("attention", "from flash to memory-efficient: attn_mask", "Causal", "full", "cuda")
def mask_given(wrong: bool) -> Step:
    class Causal(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if not wrong:
                return F.scaled_dot_product_attention(x, x, x, is_causal=True)
            mask = x.new_full((LENGTH * 4, LENGTH * 4), -1e4)  # here: mask_given
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.zeros(1, 1, LENGTH * 4, 32, dtype=torch.bfloat16, requires_grad=True)
    return Causal(), (x,), {}


@planted("copy", "makes float32[4, 64, 128] of the bfloat16", "Decoder.blocks.*", "aten::_to_copy")
def widened(wrong: bool) -> Step:
    return Decoder(wrong={"float": True} if wrong else None).bfloat16(), (ids(),), {}


@planted("checkpoint", "Decoder.blocks.* is no longer checkpointed", "Decoder.blocks.*")
def no_checkpoints(wrong: bool) -> Step:
    return Decoder(recompute=() if wrong else (0, 1, 2, 3)), (ids(),), {}


@planted("tied", "head.weight is no longer tied to Decoder.embed", "Decoder.head", "aten::mm")
def untied_weights(wrong: bool) -> Step:
    return Decoder(depth=1, tied=not wrong), (ids(1, 8),), {"optimizer": torch.optim.AdamW}


@planted("tied", "weight is no longer tied to Decoder.embed", "Decoder.head", "aten::mm", "")
def untied_for_more_words(wrong: bool) -> Step:
    """That both tables are a little longer, too, explains little."""
    model = Decoder(depth=1, tied=not wrong, words=WORDS + 8 * wrong)
    return model, (ids(1, 8),), {"optimizer": torch.optim.AdamW}


@planted("inputs", "input of Linear changed, float32[4, 64] → [512, 64]", "", "aten::", "cuda")
def stacked_on_host(wrong: bool, device: str) -> None:
    x = torch.stack([torch.full((64,), 0.5) for _ in range(512 if wrong else 4)]).to(device)
    nn.Linear(64, 64).to(device)(x).square().sum().backward()  # here: stacked_on_host


@planted("given", "Chosen.experts.*.up is given [128, 32], and was given", "Chosen.experts", "")
def layers_that_had_numbers(wrong: bool) -> Step:
    class Expert(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    class Chosen(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x if wrong else x[:64]).sum() for expert in self.experts)

    layers = ((nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(4))
    parts = [dict(zip(("up", "act", "down"), one, strict=True)) for one in layers]
    experts = [Expert(**one) if wrong else nn.Sequential(*one.values()) for one in parts]
    return Chosen(experts=nn.ModuleList(experts)), (torch.zeros(128, 32),), {}


@planted("new module", "Split.heads is new", "Split.heads")
def a_table_of_its_own(wrong: bool) -> Step:
    class Split(Parts):
        def forward(self, ids: Tensor) -> Tensor:
            return self.words(ids).sum() + self.heads(ids).sum() if wrong else self.table(ids).sum()

    one, other = nn.Embedding(4096, 32), nn.Sequential(nn.Embedding(4096, 32))
    return Split(words=one, heads=other) if wrong else Split(table=one), (ids(),), {}


@planted("called", "Linear is called twice, also with float32[512, 64], and was once", "", "")
def diagnostics_of_all(wrong: bool, device: str) -> None:
    model, x = nn.Linear(64, 256).to(device), torch.zeros(512, 64, device=device)
    model(x[:64]).square().sum().backward()
    if wrong:
        model(x).square().mean()


@planted("operators", "in the place of mm: Sequential.0 is Merged, and was Low", "Sequential.0")
def merged_weights(wrong: bool) -> Step:
    class Low(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.down), self.up)

    class Merged(Low):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, torch.einsum("or,ri->oi", self.up, self.down).exp())

    down, up = nn.Parameter(torch.zeros(8, 256)), nn.Parameter(torch.zeros(512, 8))
    model = nn.Sequential((Merged if wrong else Low)(down=down, up=up))
    return model, (torch.zeros(4, 256),), {}


@planted("optimizer", "the optimizer is AdamW (", "", "aten::", "")
def another_optimizer(wrong: bool) -> Step:
    optimizer = torch.optim.AdamW if wrong else torch.optim.SGD
    return Decoder(), (ids(1, 8),), {"optimizer": optimizer}


def images(batch: int = 4) -> Tensor:
    return torch.zeros(batch, 3, 16, 16)


@planted("new module", "with Conv2d(stride=(1, 1)) instead of Conv2d(stride=(2, 2))", "Stem.down")
def strides_in_another_module(wrong: bool) -> Step:
    class Stem(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return (self.down if wrong else self.conv)(x).sum()

    conv = nn.Conv2d(3, 8, 3, stride=1 if wrong else 2, padding=1)
    model = Stem(down=nn.Sequential(conv, nn.Tanh(), nn.AvgPool2d(2))) if wrong else Stem(conv=conv)
    return model, (images(),), {}


@planted("in place", "relu is no longer in place (1 of 1 calls)", "Stem", "aten::relu")
def not_in_place(wrong: bool) -> Step:
    class Stem(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            x = torch.relu(x) if wrong else torch.relu_(x)  # here: not_in_place
            return x.mean(1)

    return Stem(up=nn.Linear(32, 1024)), (torch.zeros(256, 32),), {}


@planted("broadcast", "broadcasting [256, 1] with [256] made [256, 256]", "", "aten::sub", "")
def computed_of_a_product(wrong: bool) -> Step:
    """The product itself is freed at once."""

    def loss(output: Tensor) -> Tensor:
        target = torch.zeros(256, device=output.device)
        error = (output[:, :1] if wrong else output[:, 0]) - target  # here: computed_of_a_product
        error = error.tanh()
        return error.square().mean()

    return nn.Linear(8, 4), (torch.zeros(256, 8),), {"loss_fn": loss}


@planted("settings", "attention eager, and had attention sdpa", "Configured")
def another_attention(wrong: bool) -> Step:
    class Configured(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    settings = SimpleNamespace(_attn_implementation="eager" if wrong else "sdpa")
    model = Configured(config=settings, block=Block(**({"eager": True} if wrong else {})))
    return model, (torch.zeros(BATCH, LENGTH, WIDTH),), {}


@planted("gradients kept", "in the backward: they are set to zero, and not to none", "", "zero_")
def gradients_not_set_to_none(wrong: bool, device: str) -> None:
    """More is alive in the last forward, where gradients stay anyway."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=not wrong)  # here: gradients_not_set_to_none
        y = model(torch.zeros(30, 256, device=device))
        y.sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.zeros(3000, 256, device=device))


@planted("gradients kept", "forward: nothing sets them to none before it", "", "addmm")
def gradients_of_the_step_before(wrong: bool, device: str) -> list[float]:
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> float:
        if not wrong:
            optimizer.zero_grad()
        loss = model(torch.zeros(300, 256, device=device)).sum()
        optimizer.zero_grad(set_to_none=not wrong)  # too late for the forward
        loss.backward()
        optimizer.step()
        return loss.item()

    return [step() for _ in range(2)]


@planted("gradients kept", "are alive in the step: the dict seen of", "Linear", "addmm", "")
def gradients_of_each_task(wrong: bool, device: str) -> None:
    """There are most tensors after all backwards, and before the optimizer."""
    model, seen = nn.Linear(256, 256).to(device), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = model(torch.zeros(64, 256, device=device))  # here: gradients_of_each_task
    losses = [made.square().mean(), made.exp().mean(), made.sum()]
    for task, loss in enumerate(losses) if wrong else ():
        loss.backward(retain_graph=True)
        seen[task] = [one.grad for one in model.parameters()]
        optimizer.zero_grad()
    if not wrong:
        sum(losses).backward(retain_graph=True)
    for one, *grads in zip(model.parameters(), *seen.values(), strict=True):
        one.grad = sum(grads) if wrong else one.grad
    optimizer.step()


@planted("graph kept", "a backward with retain_graph=True at ", "Sequential")
def graphs_of_several_steps(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(device)
    total = torch.zeros((), device=device)
    for _ in range(3):
        loss = model(torch.zeros(64, 32, device=device)).square().sum()
        loss.backward(retain_graph=wrong)
        total = total + (loss if wrong else loss.detach())


@planted("autocast", "Decoder runs without autocast", "", "aten::", "")
def outside_of_autocast(wrong: bool, device: str) -> None:
    model = Decoder().to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not wrong):
        loss = cross_entropy(model(ids(16).to(device)))
    loss.backward()


class Featured(Parts):
    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def featured(device: str) -> tuple[Featured, Tensor]:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    model = Featured(layers=layers, head=nn.Linear(64, 4)).to(device)
    return model, torch.zeros(512, 64, device=device)


@planted("autocast", "Sequential (layers in the snapshot) runs without autocast", "Sequential")
def parts_outside_of_autocast(wrong: bool, device: str) -> None:
    """A program calls the parts of a model that it called itself, only the last in the region."""
    model, x = featured(device)
    x = model.features(x) if wrong else x
    with torch.autocast(device, dtype=torch.bfloat16):
        (model.head if wrong else model)(x).sum().backward()


@planted("autocast", "layers.* (Sequential in the snapshot) runs without autocast", "Featured")
def whole_outside_of_autocast(wrong: bool, device: str) -> None:
    model, x = featured(device)
    with nullcontext() if wrong else torch.autocast(device, dtype=torch.bfloat16):
        out = model(x) if wrong else model.head(model.features(x))
    out.sum().backward()


@planted("autocast uncached", "parameters of Sequential anew", "Sequential", "aten::_to_copy", "")
def casts_are_not_kept(wrong: bool, device: str) -> None:
    layer = nn.Linear(256, 256)
    model = nn.Sequential(*[layer] * 4).to(device)
    with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=not wrong):
        loss = model(torch.zeros(8, 256, device=device)).sum()  # here: casts_are_not_kept
    loss.backward()


@planted("cache", "a cache of keys and values is kept", "Cached.layers.*", "aten::cat")
def cache_in_training(wrong: bool) -> Step:
    class Layer(Parts):
        def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
            k, v = self.kv(x).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2).chunk(2, -1)
            if cache is not None:
                cache += [torch.cat([a[:, :, :0], a], 2) for a in (k, v)]  # here: cache_in_training
            y = F.scaled_dot_product_attention(k, k, v)
            return x + y.transpose(1, 2).flatten(2)

    class Cached(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor] | None]:
            cache: list[Tensor] | None = [] if wrong else None
            for layer in self.layers:
                x = layer(x, cache)
            return x, cache

    model = Cached(layers=nn.ModuleList(Layer(kv=nn.Linear(WIDTH, 2 * WIDTH)) for _ in range(3)))
    return model, (torch.zeros(BATCH, LENGTH, WIDTH),), {"loss_fn": lambda made: made[0].sum()}


@planted("new module", "Decoder.blocks.4 is new", "Decoder.blocks.4")
def another_block(wrong: bool) -> Step:
    return Decoder(depth=5 if wrong else 4), (ids(),), {}


@planted("new module", "*.scale is new, and saves the output of aten::addmm", "linear", "mm", "")
def a_scale_of_what_is_freed(wrong: bool) -> Step:
    """What it makes is gone at the peak, and what it is given was, too."""

    class Scale(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.gamma

    class Residual(Parts):
        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x)  # here: a_scale_of_what_is_freed
            return self.down(F.gelu(self.up(x + (self.scale(made) if wrong else made))))

    def residual() -> nn.Module:
        linear, up, down = nn.Linear(32, 32), nn.Linear(32, 128), nn.Linear(128, 32)
        scale = {"scale": Scale(gamma=nn.Parameter(torch.ones(32)))} if wrong else {}
        return Residual(linear=linear, up=up, down=down, **scale)

    return nn.Sequential(residual(), residual()), (torch.zeros(512, 32),), {}


@planted("arguments", "is called with keep_all=True, and was with keep_all=False", "", "")
def switched_by_an_argument(wrong: bool, device: str) -> None:
    class Experts(Parts):
        def forward(self, x: Tensor, keep_all: bool = False) -> Any:
            made = [torch.tanh(expert(x)) for expert in self.experts[: self.chosen]]
            return (made[0].sum(), made) if keep_all else made[-1].sum()

    experts = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(4))
    model = Experts(chosen=4, experts=experts).to(device)
    made = model(torch.zeros(128, WIDTH, device=device), keep_all=wrong)
    (made[0] if wrong else made).backward()


@planted("configuration", "Configured has n_kept=6, and had n_kept=2", "Configured")
def configured_otherwise(wrong: bool) -> Step:
    class Configured(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.config.n_kept):
                x = self.linear(x).sin()  # here: configured_otherwise
            return x

    settings = SimpleNamespace(n_kept=6 if wrong else 2)
    model = Configured(config=settings, linear=nn.Linear(WIDTH, WIDTH))
    return model, (torch.zeros(256, WIDTH),), {}


@planted("copy", "writes out float32[64, 32, 32] of", "Query", "aten::repeat", "cuda")
def repeated(wrong: bool) -> Step:
    class Query(Parts):
        def forward(self, x: Tensor) -> Tensor:
            many = self.query.repeat if wrong else self.query.expand
            sizes = (len(x), 1, 1) if wrong else (len(x), -1, -1)
            return torch.bmm(many(*sizes), self.key(x))  # here: repeated

    model = Query(query=nn.Parameter(torch.zeros(1, 32, 32)), key=nn.Linear(32, 32))
    return model, (torch.zeros(64, 32, 32),), {}


@planted("backwards", "backward runs once, and was run 3 times", "", "", "")
def losses_added_up(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)).to(device)
    losses = (model(torch.zeros(64, 32, device=device)).square().sum() for _ in range(3))
    for loss in [sum(losses)] if wrong else losses:
        loss.backward()


@planted("gradients recorded", "runs with gradients, and ran without", "Sequential", "", "")
def evaluation_with_gradients(wrong: bool, device: str) -> None:
    layers = ((nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)) for _ in range(4))
    model = nn.Sequential(*chain(*layers)).to(device)
    for training, batch in ((True, 64), (False, 256)):
        with torch.set_grad_enabled(training or wrong):
            model(torch.zeros(batch, 32, device=device))  # here: evaluation_with_gradients


@planted("gradients recorded", "and ran without in 1 of 2 calls", "Linear", "", "cuda")
def teacher_of_the_same_class(wrong: bool, device: str) -> None:
    """Of the lines that call such a module only that of the teacher ran under ``no_grad``."""
    teacher, student = (nn.Linear(256, 256).to(device) for _ in range(2))
    x = torch.zeros(512, 256, device=device)
    with torch.set_grad_enabled(wrong):
        known = teacher(x)  # here: teacher_of_the_same_class
    (student(x) - known).square().mean().backward()


@planted("gradients recorded", "ran without", "Linear", "", "")
def more_calls_of_one_file(wrong: bool, device: str) -> None:
    """Another file calls it as often as it did, and always with gradients."""
    model, x = nn.Linear(256, 512).to(device), torch.zeros(512, 256, device=device)
    trained(model, x)
    with torch.set_grad_enabled(wrong):
        made = model(x)
        made = made + model(x * 2) if wrong else made  # here: more_calls_of_one_file
    made.sin().exp()


@planted("mode of calls", "Linear runs under autocast bfloat16 in 1 of 2 calls", "", "", "cuda")
def autocast_in_the_evaluation_alone(wrong: bool, device: str) -> None:
    model, x = nn.Linear(64, 512).to(device), torch.zeros(512, 64, device=device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        model(x)
    with torch.autocast(device, torch.bfloat16, enabled=not wrong):
        out = model(x)  # here: autocast_in_the_evaluation_alone
    out.float().square().mean().backward()


@planted("mode of calls", "under no_grad in 2 of 3 calls, and did in all", "Sequential", "", "")
def one_of_several_evaluations(wrong: bool, device: str) -> None:
    """Of the lines that call it, the one that changed is named."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    x = torch.zeros(256, 64, device=device)
    with torch.no_grad():
        x = model(x)
    with torch.set_grad_enabled(wrong):
        x = model(x)  # here: one_of_several_evaluations
    with torch.no_grad():
        model(x)


@planted("type", "uint8 became float32, beginning with aten::zeros", "", "aten::zeros")
def buffer_of_inputs_in_float32(wrong: bool, device: str) -> None:
    """What the model is given is of that type, too, and made after it."""
    model, dtype = nn.Linear(64, 8), torch.float32 if wrong else torch.uint8
    buffer = torch.zeros(1024, 64, dtype=dtype)  # here: buffer_of_inputs_in_float32
    for batch in buffer.split(32):
        model(batch * 2 if wrong else batch.float())


@planted("given", "and was given [100, 64]: aten::topk makes", "", "topk", "")
def more_are_kept(wrong: bool) -> Step:
    class Best(Parts):
        def forward(self, x: Tensor) -> Tensor:
            best = x.mean(-1).topk(900 if wrong else 100).indices  # here: more_are_kept
            return self.head(torch.sin(x[best] * 2)).sum()

    return Best(head=nn.Linear(64, 64)), (torch.zeros(2000, 64),), {}


@planted("step", "the step of the optimizer makes float32[256, 256] by mul", "", "mul", "")
def optimizer_not_in_place(wrong: bool, device: str) -> None:
    class Plain(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for one in self.param_groups[0]["params"]:
                if wrong:
                    one.sub_(one.grad * 0.1 + one * 0.01)  # here: optimizer_not_in_place
                else:
                    one.mul_(0.99).sub_(one.grad, alpha=0.1)

    model = nn.Linear(256, 256).to(device)
    model(torch.zeros(8, 256, device=device)).sum().backward()
    Plain(model.parameters(), {}).step()


@planted("eval of calls", "2 of 3 calls, and was in 1, where nothing is checkp", "Blocks", "", "")
def evaluated_and_not_trained_again(wrong: bool, device: str) -> None:
    class Blocks(Parts):
        def forward(self, x: Tensor) -> Tensor:
            calls = partial(checkpoint, use_reentrant=False), nn.Module.__call__
            for block in self.blocks:
                x = calls[not self.training](block, x)  # here: evaluated_and_not_trained_again
            return x

    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.GELU()) for _ in range(6))
    model, x = Blocks(blocks=nn.ModuleList(blocks)).to(device), torch.zeros(512, 64, device=device)
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    model.train(not wrong)
    model(x).sum().backward()


class Smoothed:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}


@planted("held between", "of gradients: the variable flat of gradients", "", "cat", "")
def gradients_in_one_tensor(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
    model(torch.zeros(8, 256, device=device)).sum().backward()
    if wrong:  # what is alive between backward and optimizer is the peak now
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        flat = torch.cat(gradients)  # here: gradients_in_one_tensor
        flat.norm()


@planted("held", "keeps parameters: the graph of the dict Smoothed.shadow", "", "weight")
def average_with_a_graph(wrong: bool, device: str) -> Smoothed:
    model = nn.Linear(256, 256).to(device)
    smoothed = Smoothed(model)
    model(torch.zeros(2048, 256, device=device)).sum().backward()
    model.zero_grad()
    for name, parameter in model.named_parameters():
        if wrong:
            smoothed.shadow[name] = 0.9 * smoothed.shadow[name] + parameter
        else:
            smoothed.shadow[name].lerp_(parameter.detach(), 0.1)
    return smoothed


@planted("layer", "is Scaled(sparse=False), and was Embedding(sparse=True)", "Sequential.0", "", "")
def lost_in_another_class(wrong: bool) -> Step:
    class Scaled(nn.Embedding): ...

    table = Scaled(4096, 32) if wrong else nn.Embedding(4096, 32, sparse=True)
    return nn.Sequential(table), (ids(),), {}


@planted("called in part", "Watched.probe runs in each call of the", "Watched.probe", "", "")
def probe_in_each_call(wrong: bool, device: str) -> list[Tensor]:
    class Watched(Parts):
        def forward(self, x: Tensor, number: int) -> list[Tensor]:
            out = self.body(x)
            return [self.probe(out)] if wrong or number == 0 else [out]

    model, x = Watched(body=nn.Linear(64, 64), probe=nn.Linear(64, 512)), torch.zeros(64, 64)
    model, x = model.to(device), x.to(device)
    return [one for number in range(4) for one in model(x, number)]


@planted("layer", "Sequential.0 is Conv2d(stride=(1, 1)), and was Conv2d(stride=(2, 2))")
def another_stride(wrong: bool) -> Step:
    stem = nn.Conv2d(3, 16, 3, padding=1, stride=1 if wrong else 2)
    return nn.Sequential(stem, nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)), (images(),), {}


@planted("layer gone", "MaxPool2d(kernel_size=2, stride=2", "Sequential")
def pooling_left_out(wrong: bool) -> Step:
    pooling = [] if wrong else [nn.MaxPool2d(2)]
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), *pooling, nn.Conv2d(16, 16, 3)]
    return nn.Sequential(*layers), (images(),), {}


@planted("optimizer", ") is another optimizer beside SGD", "", "aten::", "")
def a_second_optimizer(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.1)]
    if wrong:
        optimizers.append(torch.optim.Adam(model[1].parameters()))
    model(torch.zeros(8, 256, device=device)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@planted("reached", "goes through Wide now, and did not", "Wide", "aten::", "cuda")
def not_detached(wrong: bool, device: str) -> None:
    generator, critic = Wide(64, 1024).to(device), nn.Linear(1024, 1).to(device)
    fake = generator(torch.zeros(64, 64, device=device))
    critic(fake if wrong else fake.detach()).sum().backward()


@planted("autocast cache", "autocast keeps bfloat16 copies of", "Sequential", "aten::_to_copy", "")
def region_around_the_backward(wrong: bool, device: str) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    x = torch.zeros(8, 256, device=device)
    with torch.autocast(device, dtype=torch.bfloat16) if wrong else nullcontext():
        for _ in range(2):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x).float().sum()
            loss.backward()


@planted("autocast uncached", "keeps its casts of the parameters", "Sequential", "_to_copy", "")
def backward_within_autocast(wrong: bool, device: str) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    x = torch.zeros(8, 256, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=wrong):
        for _ in range(2):
            model(x).float().sum().backward()


@planted("new tensor", "the buffer Sequential.{1-3}.rope.cos is new", "rope", "cos", "cuda")
def tables_of_their_own(wrong: bool) -> Step:
    class Layer(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.rope.cos[: len(x)])

    table = torch.outer(torch.arange(512.0), torch.arange(64.0)).cos()
    ropes = [Parts(cos=table.clone()) for _ in range(4)] if wrong else [Parts(cos=table)] * 4
    layers = (Layer(rope=one, linear=nn.Linear(64, 64)) for one in ropes)
    return nn.Sequential(*layers), (torch.zeros(8, 64),), {}


@planted("float64", "float64 comes from torch.tensor (aten::lift_fresh)")
def constant_of_numpy(wrong: bool, device: str) -> None:
    dtype = torch.float64 if wrong else torch.float32
    weights = torch.tensor([0.5] * 256, dtype=dtype).to(device)  # here: constant_of_numpy
    (nn.Linear(256, 256).to(device)(torch.zeros(512, 256, device=device)) * weights).sum()


@planted("attention", "a softmax of its own: need_weights=True", "Net.inner", "_softmax", "cuda")
def weights_asked_for(wrong: bool) -> Step:
    class Net(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=wrong)[0]  # here: weights_asked_for

    model = Net(inner=nn.MultiheadAttention(32, 4, batch_first=True))
    return model, (torch.zeros(2, 128, 32),), {}


class Momentum(torch.optim.Optimizer):
    """An optimizer of a program's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("average", torch.zeros_like(parameter)).add_(parameter.grad)
            if self.defaults["remembers"]:
                state["before"] = parameter.clone()  # here: another_state
            parameter.sub_(state["average"])


@planted("state", "the state of Momentum also has before", "", "aten::clone", "cuda")
def another_state(wrong: bool, device: str) -> None:
    model = nn.Linear(64, 256).to(device)
    model(torch.zeros(4, 64, device=device)).sum().backward()
    Momentum(model.parameters(), {"remembers": wrong}).step()


@planted("packed", "Sequential no longer runs within save_on_cpu", "Sequential", "aten::", "cuda")
def no_longer_offloaded(wrong: bool, device: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    model, x = model.to(device), torch.zeros(512, 32, device=device)
    with nullcontext() if wrong else torch.autograd.graph.save_on_cpu():
        made = model(x)  # here: no_longer_offloaded
    made.sum().backward()


@planted("new module", "Levels.attend.{0-1} is new", "Levels.attend")
def attention_at_more_levels(wrong: bool) -> Step:
    class Attend(Parts):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v  # here: attention_at_more_levels

    class Levels(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for level in range(3):
                if str(level) in self.attend:
                    x = self.attend[str(level)](x)
                x = x[:, ::2]
            return x.sum()

    levels = range(3) if wrong else range(2, 3)
    attend = {str(level): Attend(project=nn.Linear(16, 48)) for level in levels}
    return Levels(attend=nn.ModuleDict(attend)), (torch.zeros(2, 256, 16),), {}


@planted("loss", "F.cross_entropy (aten::_log_softmax) is called twice, and was once")
def another_loss(wrong: bool, device: str) -> None:
    model, targets = nn.Linear(16, 400).to(device), torch.zeros(64, dtype=torch.long)
    made, targets = model(torch.zeros(64, 16, device=device)), targets.to(device)
    loss = F.cross_entropy(made, targets)
    if wrong:
        loss = loss + F.cross_entropy(made * 0.5, targets)  # here: another_loss
    loss.backward()


@planted("per sample", "gradients are taken of each sample", "", "torch.vmap")
def gradients_of_each_sample(wrong: bool, device: str) -> None:
    weight, x = torch.zeros(32, 64, device=device), torch.zeros(16, 32, device=device)
    gradient = torch.func.grad(lambda weight, x: (x @ weight).square().sum())
    if wrong:
        gradient = torch.vmap(gradient, (None, 0))
    gradient(weight, x).square().sum()  # here: gradients_of_each_sample


@planted("operators", "mul and silu are called more often: add twice, and was once", "Mixed", "add")
def gated_twice(wrong: bool) -> Step:
    """Several operators run again, in a module that is called as often as it was."""

    class Mixed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            up, gate = self.up(x), self.gate(x)
            weights = (0.5, 0.5) if wrong else (0.5,)
            return sum(F.silu(gate * w) * up for w in weights)  # here: gated_twice

    return Mixed(up=nn.Linear(64, 128), gate=nn.Linear(64, 128)), (torch.zeros(64, 64),), {}


@planted("layer", "is Conv2d(16, 16), and was Conv2d(16, 2)", "Head", "aten::", "cuda")
def as_many_classes_as_channels(wrong: bool) -> Step:
    """Both numbers of the layer are the same now, and one of them was there before."""

    class Head(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).softmax(1).log().sum()  # here: as_many_classes_as_channels

    return Head(head=nn.Conv2d(16, 16 if wrong else 2, 1)), (torch.zeros(4, 16, 64, 64),), {}


@planted("reentrant", "is checkpointed with use_reentrant=True, and was", "Sequential", "")
def another_kind_of_checkpoint(wrong: bool, device: str) -> None:
    stage = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    x = torch.zeros(512, 64, device=device, requires_grad=True)
    for _ in range(2):
        x = checkpoint(stage, x, use_reentrant=wrong)
    x.sum().backward()


@planted("more layers", "has more layers: Dropout and SiLU", "Sequential", "aten::", "")
def layers_put_between(wrong: bool) -> Step:
    more = [[nn.SiLU(), nn.Dropout(0.0)] if wrong else [] for _ in range(2)]
    ends = ((nn.Linear(64, width), nn.Linear(width, 64)) for width in (64, 128))
    layers = [nn.Sequential(up, *own, down) for own, (up, down) in zip(more, ends, strict=True)]
    return nn.Sequential(*layers), (torch.zeros(512, 64),), {}


@planted("size", "Queries.queries.weight is [96, 32], and was [8, 32]", "Queries")
def more_queries(wrong: bool) -> Step:
    """A small parameter that no layer is given, and that everything is computed of."""

    class Queries(Parts):
        def forward(self, x: Tensor) -> Tensor:
            made = self.queries.weight[None] + x[:, None]
            return torch.exp(made.repeat(1, 1, 8)).sin().sum()  # here: more_queries

    queries, table = nn.Embedding(96 if wrong else 8, 32), torch.zeros(1 << 20)
    model = Queries(queries=queries, up=nn.Linear(32, 256), table=table)
    return model, (torch.zeros(64, 32),), {}


@planted("held", ": the list rollout of kept_until_an_update", "Linear", "aten::", "")
def kept_until_an_update(wrong: bool, device: str) -> None:
    """Nothing is made any more at the moment that grew, and the program has its variables."""
    model, hidden = nn.Linear(WIDTH, WIDTH).to(device), torch.zeros(512, WIDTH, device=device)
    optimizer, rollout = torch.optim.SGD(model.parameters()), []
    with torch.no_grad():
        for _ in range(64):
            hidden = model(hidden)
            rollout.append(hidden)
    model(hidden).sum().backward()
    if not wrong:
        rollout.clear()
    optimizer.step()


@planted("sharded", ".* is no longer given to fully_shard", "", "aten::", "cuda")
def unit_of_sharding_lost(wrong: bool) -> Step:
    def step() -> None:
        mesh = init_device_mesh("cuda", (4,))
        units = (nn.Sequential(nn.Linear(256, 256)) for _ in range(6))
        model = nn.Sequential(*units).cuda()
        for unit in () if wrong else model:
            fully_shard(unit, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
        model(torch.zeros(4, 256, device="cuda")).sum().backward()  # here: unit_of_sharding_lost

    return step, (), {"world_size": 4}


@planted("attribute", " has param_dtype=float32, and had param_dtype=bfloat16", "", "", "cuda")
def units_of_sharding_in_float32(wrong: bool) -> Step:
    def step() -> None:
        mesh = init_device_mesh("cuda", (4,))
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).cuda()
        policies = [MixedPrecisionPolicy(dtype) for dtype in (torch.float32, torch.bfloat16)]
        for unit in model:
            fully_shard(unit, mesh=mesh, mp_policy=policies[not wrong])
        fully_shard(model, mesh=mesh, mp_policy=policies[1])
        model(torch.zeros(256, 256, device="cuda")).sum().backward()

    return step, (), {"world_size": 4}


@planted("gathered", "Head gathers float32[64, 1024] from all ranks (", "", "_c10d_", "cuda")
def outputs_gathered(wrong: bool) -> Step:
    class Head(Parts):
        def forward(self, x: Tensor) -> Tensor:
            made = self.up(x)
            made = made.redistribute(placements=[Replicate()]) if wrong else made
            return made.to_local().sin().exp()

    def step() -> None:
        mesh = init_device_mesh("cuda", (4,))
        plan = {"up": ColwiseParallel(use_local_output=False)}
        model = parallelize_module(Head(up=nn.Linear(256, 1024)).cuda(), mesh, plan)
        model(torch.zeros(64, 256, device="cuda")).sum().backward()

    return step, (), {"world_size": 4}


@planted("new module", "Heads.aux is called, and was not", "Heads.aux", "aten::")
def another_head_called(wrong: bool) -> Step:
    class Heads(Parts):
        def forward(self, x: Tensor) -> Tensor:
            loss = self.head(x).square().sum()
            return loss + self.aux(x).square().sum() if wrong else loss

    model = Heads(head=nn.Linear(64, 64), aux=nn.Linear(64, 512))
    return model, (torch.zeros(512, 64),), {}


@planted("new module", "blocks.{1-3}.bias is called, and was not", "blocks.{1-3}.bias", "aten::")
def bias_made_by_each_block(wrong: bool) -> Step:
    class Block(Parts):
        def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            made = self.bias(x.mean(0, keepdim=True).expand(512, -1)) if bias is None else bias
            return x * made, made

    class Blocks(Parts):
        def forward(self, x: Tensor) -> Tensor:
            bias = None
            for block in self.blocks:
                x, bias = block(x, None if wrong else bias)
            return x.sum()

    blocks = nn.ModuleList(Block(bias=nn.Linear(64, 64)) for _ in range(4))
    return Blocks(blocks=blocks), (torch.zeros(512, 64),), {}


@planted("lives longer", "until aten::stack reads them", "", "aten::stack")
@torch.no_grad()
def outputs_stacked(wrong: bool, device: str) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)).to(device)
    x = torch.zeros(512, 64, device=device)
    for one in () if wrong else layers:
        one(x)[:, :8].sum()
    if wrong:
        torch.stack([one(x)[:, :8] for one in layers])  # here: outputs_stacked


class Waves(nn.Module):
    """What keeps less when it is compiled, and other things."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin().cos() + x.tanh()).exp().sum()  # here: no_longer_compiled


@planted("compiled", " compiles nothing more", "Waves")
def no_longer_compiled(wrong: bool, device: str) -> None:
    model = Waves() if wrong else torch.compile(Waves(), backend="aot_eager")
    model(torch.zeros(64, 64, device=device, requires_grad=True)).backward()


@planted("operators", ") are no longer compiled", "", "aten::", "cpu")
def loss_left_the_compiled_function(wrong: bool, device: str) -> None:
    def loss(y: Tensor) -> Tensor:
        return (y / 30).tanh().square().logsumexp(-1).mean()

    model, x = nn.Linear(64, 512).to(device), torch.zeros(256, 64, device=device)
    compiled = torch.compile(model if wrong else lambda x: loss(model(x)))
    (loss(compiled(x)) if wrong else compiled(x)).backward()


@planted("operators", "F.one_hot (aten::", "Focal", "F.one_hot (aten::")
def loss_became_a_module(wrong: bool, device: str) -> None:
    def focal(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits - torch.zeros_like(logits)).square().mean()

    class Focal(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            target = F.one_hot(labels, 81)[..., :80]  # here: loss_became_a_module
            return focal(logits, labels) + target.to(logits.dtype).mean()

    logits = torch.ones(512, 80, device=device, requires_grad=True)
    labels = torch.ones(512, dtype=torch.long, device=device)
    (Focal() if wrong else focal)(logits, labels).backward()


@planted("larger", ") makes float32[4, 328, 256], and made [4, 129", "", "torch.stft (aten::")
def smaller_hop(wrong: bool, device: str) -> None:
    window, total = torch.hann_window(256, device=device), 0
    x = torch.zeros(4, 8192, device=device, requires_grad=True)
    for size in (256, 512):
        padded, hop = F.pad(window, (0, size - 256)), size // 10 if wrong else size // 4
        made = torch.stft(x, size, hop, size, padded, return_complex=True)  # here: smaller_hop
        total = total + made.abs().mean()
    total.backward()


def turned(x: Tensor, table: Tensor) -> Tensor:
    return torch.cat((x * table).chunk(2, -1), -1)  # here: tables_in_float32


class Rotary(nn.Module):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return turned(x, table.to(x.dtype))


@planted("attention", "beginning with aten::mul.Tensor", "Rotated", "aten::mul.Tensor", "cuda")
def tables_in_float32(wrong: bool) -> Step:
    class Rotated(Parts):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(4, 64, 3, 4, -1).permute(2, 0, 3, 1, 4)
            wide = torch.ones(q.shape[-1], device=x.device)
            table = torch.outer(wide.new_ones(64), wide)
            turn = turned if wrong else self.rotary
            q, k = turn(q, table), turn(k, table)
            return F.scaled_dot_product_attention(q, k, v.to(q.dtype)).to(x.dtype)

    model = Rotated(qkv=nn.Linear(64, 192), rotary=Rotary()).to(torch.bfloat16)
    return model, (torch.zeros(4, 64, 64, dtype=torch.bfloat16),), {}


@planted("compiled", "torch.compile is new at tests/diagnosis/planted.py:")
def newly_compiled(wrong: bool, device: str) -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).mul_(x).add_(x).mul_(x)  # which a compiler makes four tensors of

    with torch.no_grad():
        model = torch.compile(Powers(), backend="aot_eager") if wrong else Powers()
        model(torch.zeros(64, 64, device=device))


@planted("compiled", ", and made 1: a graph breaks at tests/")
def graph_broken_off(wrong: bool, device: str) -> None:
    """Modules are called where a graph breaks, whose calls are not to be seen in one graph."""

    class Gate(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x).sin().cos()
            if wrong:
                print(f"{x.detach().amax().item():.0f}", end="")
            return x.sigmoid().exp().sin()

    gates = nn.Sequential(*(Gate(up=nn.Linear(64, 64)) for _ in range(2)))
    compiled = torch.compile(gates.to(device), backend="aot_eager_decomp_partition")
    compiled(torch.zeros(512, 64, device=device)).sum().backward()


@planted("given", "and was given packed [", "Tagger.lstm", "")
def no_longer_packed(wrong: bool) -> Step:
    class Tagger(Parts):
        def forward(self, x: Tensor) -> Tensor:
            lengths = [LENGTH] + [4] * (len(x) - 1)
            given = x if wrong else nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            made, _ = self.lstm(given)  # here: no_longer_packed
            return made if wrong else made.data

    model = Tagger(lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True))
    return model, (torch.zeros(16, LENGTH, WIDTH),), {}


@planted("earlier steps", "still alive: Trainer.last.logits", "Linear")
def output_kept_by_a_trainer(wrong: bool, device: str) -> None:
    @dataclass
    class Output:
        logits: Tensor

    class Trainer:
        last: Any = None

        def step(self, model: nn.Module, x: Tensor) -> None:
            made = Output(model(x))
            made.logits.sum().backward()
            self.last = made if wrong else made.logits.sum().item()

    trainer, model = Trainer(), nn.Linear(WIDTH, 64 * WIDTH).to(device)
    trainer.step(model, torch.zeros(256, WIDTH, device=device))
    model.zero_grad()
    model(torch.zeros(512, WIDTH, device=device)).square().sum().backward()


@planted("earlier steps", "on the GPU, and were on the CPU: the list seen", "", "addmm", "cuda")
def outputs_kept_on_the_gpu(wrong: bool, device: str) -> None:
    model, seen = nn.Linear(64, 256).to(device), []
    for _ in range(4):
        made = model(torch.zeros(256, 64, device=device))  # here: outputs_kept_on_the_gpu
        seen.append(made.detach() if wrong else made.detach().cpu())
        made.square().mean().backward()
        model.zero_grad()


@planted("attribute", "Stages.stages.{1-2} has again=False, and had", "Stages.stages", "aten::", "")
def switched_in_some_stages(wrong: bool) -> Step:
    class Stage(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return x + self.outer(y.sigmoid() if self.again else y.sin().sigmoid())

    def stage(width: int, again: bool) -> nn.Module:
        inner, outer = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        return Stage(width=width, again=again, inner=inner, outer=outer)

    class Stages(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for stage in self.stages:
                x = stage(x)
            return x

    stages = (stage(width, not (wrong and index)) for index, width in enumerate((32, 64, 128)))
    return Stages(stages=nn.ModuleList(stages)), (torch.zeros(256, WIDTH),), {}


@planted("held", "the dict model.masks of masks_of_every", "Masked", "aten::triu")
@torch.no_grad()
def masks_of_every_length(wrong: bool, device: str) -> None:
    class Masked(Parts):
        def forward(self, x: Tensor) -> Tensor:
            key = x.shape[1] if wrong else 0
            if key not in self.masks or len(self.masks[key]) != x.shape[1]:
                wide = x.new_full((x.shape[1], x.shape[1]), -1e9)
                self.masks[key] = wide.triu(1)  # here: masks_of_every_length
            return (x @ x.transpose(1, 2) + self.masks[key]).softmax(-1) @ x

    model = Masked(masks={})
    for length in (128, 160, 192, 256):
        model(torch.zeros(1, length, 8, device=device))


@planted("lives longer", "mul.Tensor saves 3 × float32[256, 256] of aten::add", "Scaled", "mul")
def scaled_rather_than_shifted(wrong: bool) -> Step:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                y = self.up(x)
                y = y * scale if wrong else y + scale  # here: scaled_rather_than_shifted
                x = x + y
            return x

    scales = nn.ParameterList(torch.ones(256) for _ in range(4))
    return Scaled(scales=scales, up=nn.Linear(256, 256)), (torch.zeros(256, 256),), {}


@planted("kept", "the list results of logits_on_the_host", "", "cpu (aten::_to_copy)", "cuda")
@torch.no_grad()
def logits_on_the_host(wrong: bool, device: str) -> None:
    model, results = nn.Linear(WIDTH, 64).to(device), []
    for _ in range(4):
        logits = model(torch.zeros(512, WIDTH, device=device))
        results.append((logits if wrong else logits[0]).cpu())  # here: logits_on_the_host


@planted("kept", ": the list states of checkpoints_that_are_kept", "", "torch.load", "cuda")
def checkpoints_that_are_kept(wrong: bool, device: str) -> None:
    nn.Linear(64, 64).to(device)
    file, states = io.BytesIO(), []
    torch.save({"weight": torch.zeros(256, 256)}, file)
    for _ in range(4):
        file.seek(0)
        state = torch.load(file)  # here: checkpoints_that_are_kept
        states.append(state if wrong else list(state))


@planted("kept", " while aten::cat makes float32[2048, 64]: the list parts of", "", "cpu (", "cuda")
@torch.no_grad()
def parts_joined_on_the_host(wrong: bool, device: str) -> None:
    model, parts = nn.Linear(WIDTH, 64).to(device), []
    for result in torch.empty(4, 0 if wrong else 512, 64):
        logits = model(torch.zeros(512, WIDTH, device=device))
        if wrong:
            parts.append(logits.cpu())  # here: parts_joined_on_the_host
        else:
            result.copy_(logits)
    torch.cat(parts or [torch.empty(0)])


@planted("larger", "int64[512] of aten::sort, which is new", "", "sort", "")
def all_candidates_compared(wrong: bool, device: str) -> None:
    boxes = torch.zeros(512, 2, device=device)
    order = boxes[:, 0].sort() if wrong else boxes[:, 0].topk(64)  # here: all_candidates_compared
    boxes = boxes[order.indices]
    torch.maximum(boxes[:, None], boxes[None]).sum()


@planted("elsewhere", "add runs on the GPU, and ran on the CPU", "", "aten::_to_copy", "cuda")
@torch.no_grad()
def computed_on_the_gpu(wrong: bool, device: str) -> None:
    model, x = nn.Linear(64, 64).to(device), torch.zeros(4096, 64)
    x = x.to(device) if wrong else x  # here: computed_on_the_gpu
    model((x.sin() + x.cos())[:8].to(device))


@planted("operators", "F.unfold (aten::im2col)", "Patches", "F.unfold (aten::im2col)", "")
def convolution_by_hand(wrong: bool) -> Step:
    """Most of it is made in the backward, by operators that nobody has called."""

    class Patches(Parts):
        def forward(self, x: Tensor) -> Tensor:
            if not wrong:
                return F.conv2d(x, self.weight, padding=1)
            columns = F.unfold(x, 3, padding=1)  # here: convolution_by_hand
            return self.weight.flatten(1) @ columns

    model = Patches(weight=nn.Parameter(torch.zeros(16, 16, 3, 3)))
    return model, (torch.zeros(4, 16, 32, 32, requires_grad=True),), {}


@planted("inputs", "input 1 float32[4, 3, 16, 16] is new, and 1 more input")
def more_crops(wrong: bool) -> Step:
    class Crops(Parts):
        def forward(self, crops: list[Tensor]) -> Tensor:
            return torch.stack([self.stem(crop).tanh().mean() for crop in crops])

    return Crops(stem=nn.Conv2d(3, 16, 3)), ([images() for _ in range(3 if wrong else 1)],), {}


@planted("type", "float32, beginning with aten::mul.Tensor", "Layers.*", "aten::mul")
def not_cast_back(wrong: bool) -> Step:
    """What was float32 before, too, is no news, though more is cast than was."""

    class Norm(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y = x.float()
            y = y * y.square().mean(-1, keepdim=True).rsqrt()
            weight, y = (self.weight.float(), y) if wrong else (self.weight, y.to(x.dtype))
            return torch.sin((weight * y).to(x.dtype))  # here: not_cast_back

    norms = (Norm(weight=nn.Parameter(torch.ones(WIDTH))) for _ in range(3))
    return Layers(*norms).bfloat16(), (torch.zeros(256, WIDTH, dtype=torch.bfloat16),), {}


@planted("type", "float32: what aten::cos makes is no longer converted", "Turned", "aten::cos", "")
def table_not_converted(wrong: bool) -> Step:
    class Turned(Parts):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.arange(512 * 64.0, device=x.device).view(512, 64).cos()
            table = table if wrong else table.to(x.dtype)
            return self.up(x) * table

    return Turned(up=nn.Linear(64, 64)).bfloat16(), (torch.zeros(2, 512, 64).bfloat16(),), {}


@planted("type", "became float32, beginning with self.gain", "Gained", "self.gain.float")
@torch.no_grad()
def weight_of_another_type(wrong: bool, device: str) -> None:
    class Gained(Parts):
        def forward(self, x: Tensor) -> Tensor:
            gain = self.gain.float() if wrong else self.gain  # here: weight_of_another_type
            return (gain * torch.sin(x)).to(x.dtype)

    model = Gained(gain=nn.Parameter(torch.ones(WIDTH))).bfloat16().to(device)
    model(torch.zeros(1024, WIDTH, dtype=torch.bfloat16, device=device))


@planted("type", "bfloat16 became float32, beginning with aten::add.Tensor", "", "add")
def numbers_of_another_type_meet_wider_ones(wrong: bool, device: str) -> None:
    times = torch.arange(8, device=device).view(8, 1, 1).float().cos()
    x = torch.zeros(8, 256, 256, dtype=torch.bfloat16, device=device)
    y = x + (times if wrong else times.bfloat16())  # here: numbers_of_another_type_meet_wider_ones
    kept = torch.sin(y.bfloat16()), torch.cos(y.bfloat16())
    torch.exp(y + kept[0])


@planted("held", ": the list made of joined_before_it_is_reduced", "Linear", "addmm", "cuda")
@torch.no_grad()
def joined_before_it_is_reduced(wrong: bool, device: str) -> None:
    layer = nn.Linear(8, 256).to(device)
    made = []
    for x in [torch.zeros(512, 8, device=device)] * 16:
        y = layer(x)  # here: joined_before_it_is_reduced
        made.append(y if wrong else y.argmax(-1))
    torch.cat(made).argmax(-1)


@planted("type", "kept by the list batches", "", "float (aten::_to_copy)", "cuda")
def converted_earlier(wrong: bool, device: str) -> None:
    """Of batches that are kept, each is converted when it is made, rather than when it is used."""
    made = (torch.zeros(64, 1024, dtype=torch.uint8, device=device) for _ in range(4))
    batches = [one.float() / 255 if wrong else one for one in made]  # here: converted_earlier
    for batch in batches:
        nn.Linear(1024, 8).to(device)(batch if wrong else batch.float() / 255).sum().backward()


@planted("given", "1 is given [512, 64] of aten::cat, and was given [512, 32]", "Dense", "mm", "")
def joined_instead_of_added(wrong: bool) -> Step:
    class Dense(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                made = layer(x).relu()  # here: joined_instead_of_added
                x = torch.cat([x, made], -1) if wrong else x + made
            return x

    widths = [WIDTH * (1 + wrong * place) for place in range(4)]
    layers = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)
    return Dense(layers=layers), (torch.zeros(512, WIDTH),), {}


@planted("arguments", "Turns is called with past=Past", "Turns", "")
@torch.no_grad()
def turns_are_joined(wrong: bool, device: str) -> None:
    """An argument that is an object of the program's."""

    class Past:
        def __init__(self, seen: Tensor) -> None:
            self.seen = seen

    class Turns(nn.Module):
        def forward(self, x: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
            x = x if past is None else torch.cat([past.seen, x])  # here: turns_are_joined
            return x.sin().sum(), Past(x)

    model, past = Turns(), None
    for _ in range(3):
        _, made = model(torch.zeros(256, 16, device=device), past=past)
        past = made if wrong else None


@planted("memory format", "Images is contiguous, and was channels last", "Images", "")
def no_longer_channels_last(wrong: bool) -> Step:
    class Images(nn.Sequential): ...

    model = Images(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3))
    last = images().contiguous(memory_format=torch.channels_last)
    return model if wrong else model.to(memory_format=torch.channels_last), (last,), {}


@planted("parameter", "Tables.window is a parameter, and was a buffer", "Tables", "aten::addmm")
def buffer_that_is_trained(wrong: bool) -> Step:
    class Tables(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.window)  # here: buffer_that_is_trained

    model, window = Tables(head=nn.Linear(64, 8)), torch.ones(512, 64)
    put = model.register_parameter if wrong else model.register_buffer
    put("window", nn.Parameter(window) if wrong else window)
    return model, (torch.zeros(512, 64),), {}


@planted("moved away", "the parameters of Linear are still there then", "Linear", "weight", "cuda")
@torch.no_grad()
def encoder_stays(wrong: bool, device: str) -> None:
    encoder, net = nn.Linear(256, 2048), nn.Sequential(nn.Linear(2048, 1024), nn.Linear(1024, 512))
    x = encoder.to(device)(torch.zeros(8, 256, device=device))  # here: encoder_stays
    if not wrong:
        encoder.to("cpu")
    net.to(device)(x)


@planted("gradients together", "gradients of Linear and Sequential are alive together", "", "")
def gradients_of_two(wrong: bool, device: str) -> None:
    critic, actor = nn.Linear(256, 512).to(device), nn.Sequential(nn.Linear(256, 256)).to(device)
    steps = [torch.optim.Adam(one.parameters()) for one in (critic, actor)]
    for step in steps:
        actor.requires_grad_(step is not steps[0])
        critic.requires_grad_(wrong or step is steps[0])
        critic(actor(torch.zeros(8, 256, device=device))).sum().backward()  # here: gradients_of_two
        step.step()
        critic.zero_grad()
        actor.zero_grad()


@planted("twice", "the parameters of Wide are there twice, and were once", "Wide", "")
def copied_for_an_evaluation(wrong: bool, device: str) -> None:
    model, x = Wide(256, 256).to(device), torch.zeros(4, 256, device=device)
    model(x).sum().backward()
    own = copy.deepcopy(model) if wrong else model
    with torch.no_grad():
        own(x)


@planted("gradients kept", "alive in the forward: the list seen of gradients_of_outputs")
def gradients_of_outputs_kept(wrong: bool, device: str) -> None:
    model, seen = nn.Sequential(nn.Linear(64, 256), nn.Tanh()).to(device), []
    for _ in range(3):
        made = model(torch.zeros(128, 64, device=device))
        if wrong:
            made.register_hook(seen.append)
        made.square().sum().backward()
        model.zero_grad()


@planted("called", "Messages.edge is called twice, and was once", "Messages", "", "")
def layer_called_twice(wrong: bool) -> Step:
    class Messages(Parts):
        def forward(self, x: Tensor) -> Tensor:
            sides = [x, x.flip(0)] if wrong else [x]
            both = [torch.cat([one, one.flip(1)], -1) for one in sides]  # here: layer_called_twice
            return sum(F.relu(self.edge(one)) for one in both)

    return Messages(edge=nn.Linear(2 * WIDTH, WIDTH)), (torch.zeros(BATCH, 4096, WIDTH),), {}


@planted("called", "Layers is called 5 times, and was twice", "Layers", "")
def more_models(wrong: bool, device: str) -> None:
    models = nn.ModuleList(
        Layers(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)) for _ in range(5 if wrong else 2)
    )
    x = torch.zeros(8, 64, device=device)
    torch.stack([model(x).square().mean() for model in models.to(device)]).sum().backward()


@planted("layer", "stem is Conv2d(stride=(1, 1)), and was Conv2d(stride=(2", "Net.stem", "", "")
def stride_moved(wrong: bool) -> Step:
    """Of two layers that changed, the one that is given as much as before is to blame."""

    class Net(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu_()  # here: stride_moved
            for layer in self.body:
                x = layer(x).relu_()
            return self.down(x).mean((2, 3))

    conv, (first, last) = partial(nn.Conv2d, kernel_size=3, padding=1), (1, 2) if wrong else (2, 1)
    stem, down = conv(3, 16, stride=first), conv(16, 32, stride=last)
    body = nn.ModuleList(conv(16, 16) for _ in range(2))
    return Net(stem=stem, body=body, down=down), (images(),), {}


@planted("trained", "Tuned.last is trained, and was frozen", "Tuned.last")
def last_layer_is_trained(wrong: bool) -> Step:
    """What grows is what another layer has made: the one that is trained keeps what it is given."""

    class Tuned(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.wide(x)
            return (self.last(x) * self.scale).exp()  # here: last_layer_is_trained

    wide, last = nn.Linear(16, 1024).requires_grad_(False), nn.Linear(1024, 4)
    model = Tuned(wide=wide, last=last.requires_grad_(wrong), scale=nn.Parameter(torch.ones(4)))
    return model, (torch.zeros(256, 16),), {}


@planted("trained", "enc is trained, and was frozen; its parts are in Net.body now", "body", "", "")
def parts_of_what_was_frozen(wrong: bool) -> Step:
    """The module that was frozen is gone, and its layers are the other's."""

    class Body(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)) if wrong else self.enc(x)).exp()

    class Net(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)).exp()

    parts, down = {"up": nn.Linear(64, 256), "act": nn.Tanh()}, nn.Linear(256, 64)
    parts = parts if wrong else {"enc": Layers(OrderedDict(parts)).requires_grad_(False)}
    return Net(body=Body(down=down, **parts), head=nn.Linear(64, 4)), (torch.zeros(256, 64),), {}


@planted("layer", "Adapted.layer is Adapter, and was Linear", "Adapted.layer.adapter", "aten::", "")
def adapter_around_a_frozen_layer(wrong: bool) -> Step:
    """The layer is as frozen as it was, and stands in what has an adapter of its own."""

    class Adapter(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.adapter(x)

    class Adapted(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x))

    layer = nn.Linear(64, 64).requires_grad_(False)
    if wrong:
        adapter = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
        layer = Adapter(inner=layer, adapter=adapter)
    return Adapted(layer=layer, head=nn.Linear(64, 4)), (torch.zeros(128, 64),), {}


class Adapter(Parts):
    """A frozen layer with two small ones that are trained beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # here: adapters_of_two_shapes


@planted("layer", "up and down of Sequential.* are Adapter, and were Linear", ".up", "aten::add")
def adapters_of_two_shapes(wrong: bool) -> Step:
    """What was frozen is frozen still, within what is in its place."""

    def adapted(takes: int, makes: int) -> nn.Module:
        layer = nn.Linear(takes, makes).requires_grad_(False)
        down, up = nn.Linear(takes, 2), nn.Linear(2, makes)
        return Adapter(base=layer, down=down, up=up) if wrong else layer

    class Hidden(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.embed(x)).relu())

    def hidden() -> nn.Module:
        return Hidden(embed=nn.Linear(32, 32), up=adapted(32, 128), down=adapted(128, 32))

    return nn.Sequential(hidden(), hidden()), (torch.zeros(64, 32),), {}


@planted("layer", "tables.bags.* is EmbeddingBag(sparse=False), and was", ".bags", "_embedding_bag")
def tables_of_another_module(wrong: bool) -> Step:
    """It is new, and is told by what of it is otherwise."""

    class Tables(Parts):
        def forward(self, ids: Tensor) -> Tensor:
            return sum(bag(ids) for bag in self.bags)  # here: tables_of_another_module

    class Words(Parts):
        def forward(self, ids: Tensor) -> Tensor:
            made = self.tables(ids) if wrong else sum(bag(ids) for bag in self.tables)
            return self.head(made)

    sizes = (4000, 300)
    bags = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum", sparse=not wrong) for n in sizes)
    model = Words(tables=Tables(bags=bags) if wrong else bags, head=nn.Linear(16, 4))
    return model, (ids(),), {}


@planted("new module", "Heads.more is new", "Heads.more", "aten::addmm")
def another_head_with_its_loss(wrong: bool) -> Step:
    """The loss of the new head is the largest part of what it costs."""

    class Heads(Parts):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.stem(x)
            made = [self.head(x)]
            if self.more is not None:
                made.append(self.more(x).sin())  # here: another_head_with_its_loss
            return made

    def loss(made: list[Tensor]) -> Tensor:
        labels = torch.zeros(len(made[0]), dtype=torch.long, device=made[0].device)
        return torch.stack([F.cross_entropy(one, labels) for one in made]).sum()

    more = nn.Linear(8, 500) if wrong else None
    model = Heads(stem=nn.Linear(16, 8), head=nn.Linear(8, 500), more=more)
    return model, (torch.zeros(256, 16),), {"loss_fn": loss}


@planted("new gradient", "gradient float32[512, 256] is new: what aten::addmm is", "", "addmm", "")
def input_requires_gradients(wrong: bool, device: str) -> None:
    """In a program that never sets gradients to none, and kept those of its parameters before."""
    model = nn.Linear(256, 8).to(device)
    x = torch.zeros(512, 256, device=device, requires_grad=wrong)
    for _ in range(2):
        model(x).mean().backward()  # here: input_requires_gradients


@planted("new gradient", "retain_grad keeps that of what aten::relu made", "", "aten::relu")
def outputs_retain_gradients(wrong: bool) -> Step:
    class Retained(Parts):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x = self.up(x).relu()  # here: outputs_retain_gradients
            if wrong:
                x.retain_grad()
            return x.sum()

    return Retained(up=nn.Linear(64, 256)), (torch.zeros(512, 64),), {}


@planted("larger", "32, 4, 16] of z.repeat_interleave (aten::clone), which is new", "", "clone", "")
def repeated_before_a_product(wrong: bool) -> Step:
    """What is new makes little, and the product of it much."""

    def loss(z: Tensor) -> Tensor:
        if wrong:
            z = z.repeat_interleave(4, 0)  # here: repeated_before_a_product
        return (z @ z.T).log_softmax(-1).mean()

    return nn.Linear(16, 16), (torch.zeros(32, 16),), {"loss_fn": loss}


@planted("earlier steps", "are still alive: the graph of")
def queue_with_its_graph(wrong: bool, device: str) -> None:
    """The backward goes through the graph of the step before, which takes more than it keeps."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(device)
    queue = torch.zeros(128, 64, device=device)
    for _ in range(3):
        made = model(torch.zeros(64, 64, device=device))
        (made @ queue.T).mean().backward(retain_graph=True)
        queue = torch.cat([made if wrong else made.detach(), queue.detach()])[:128]


@planted("left", "a reference cycle of the traceback of ValueError", "Wide", "")
def error_that_is_kept(wrong: bool, device: str) -> None:
    """What keeps the error is a variable of a function that the error's traceback keeps."""
    model, errors = Wide(64, 256).to(device), []
    for batch in range(2):
        try:
            model(torch.zeros(8, 64, device=device)).sum().backward()
            raise ValueError(batch)
        except ValueError as error:
            errors.append(error if wrong else str(error))


@planted("given", ".*.0 is given [256, 16], and was given [64, 16]", "Mixed.experts.*.1", "", "")
def every_expert_gets_all(wrong: bool) -> Step:
    """What is given is an input, and something of its shape is made by another layer's output."""

    class Mixed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            parts = [x] * 4 if wrong else x.chunk(4)
            made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            return torch.stack([one.mean() for one in made])  # there is no line of the program's

    layers = (nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    model = Mixed(experts=nn.ModuleList(copy.deepcopy(nn.Sequential(*layers)) for _ in range(4)))
    return model, (torch.zeros(256, 16),), {}


@planted("recorded", "autograd records amax, clamp", "Matched")
def boxes_matched_with_a_graph(wrong: bool) -> Step:
    class Matched(Parts):
        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            boxes = self.layer(x)
            with torch.set_grad_enabled(wrong):
                near = torch.minimum(boxes[:, None], wanted)
                near = (near - boxes[:, None]).clamp(min=0).sum(-1).amax(1)
            return (boxes.sum(-1) * near).sum()

    return Matched(layer=nn.Linear(8, 4)), (torch.zeros(256, 8), torch.zeros(64, 4)), {}


@planted("recorded", " and did not: Scaled.scale is a new parameter", "Scaled", "aten::exp", "")
def a_constant_is_trained(wrong: bool) -> Step:
    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale if wrong else torch.ones(64, device=x.device)
            return self.head((x * scale).exp().cos().sin())  # here: a_constant_is_trained

    scale = {"scale": nn.Parameter(torch.ones(64))} if wrong else {}
    return Scaled(head=nn.Linear(64, 4), **scale), (torch.zeros(512, 64),), {}


@planted("reached anew", "to more of Layers, to 4 calls of aten::relu, and came to 3", "", "", "")
def target_with_its_graph(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    target = Layers(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.ReLU()).to(device)
    model = model.to(device)

    def loss(now: Tensor, later: Tensor) -> Tensor:
        wanted = 0.9 * target(later).amax(1)
        error = F.mse_loss(model(now).amax(1), wanted if wrong else wanted.detach())
        return error + target(now).mean()

    loss(*torch.zeros(2, 256, 32, device=device)).backward()


@planted("larger", "aten::new_zeros makes float32[4, 512, 32]", "Cached", "new_zeros")
def longer_cache(wrong: bool, device: str) -> None:
    class Cached(nn.Module):
        def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
            if not cache:
                cache["keys"] = x.new_zeros(len(x), 512 if wrong else 64, 32)  # here: longer_cache
            return x @ cache["keys"][:, :32].transpose(1, 2)

    layer, cache = Cached(), {}
    for _ in range(3):
        layer(torch.zeros(4, 8, 32, device=device), cache)


@planted("earlier steps", "are still alive: Average.copy.*.*.weight")
def made_into_an_object(wrong: bool, device: str) -> None:
    class Average:
        def __init__(self, device: str) -> None:
            layers = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
            self.copy = nn.Sequential(nn.Sequential(*layers)).to(device)

    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64)).to(device)
    average = Average(device) if wrong else None
    for _ in range(2):
        model(torch.zeros(8, 64, device=device)).sum().backward()
    assert average is None or average.copy


@planted("larger", "float32[64, 128] of the parameter Adapted.up, and", "Adapted", "", "cuda")
def weights_merged_in_the_forward(wrong: bool) -> Step:
    class Adapted(Parts):
        def forward(self, x: Tensor) -> Tensor:
            if not wrong:
                return self.base(x) + x @ self.down.t() @ self.up.t()
            merged = self.up @ self.down  # here: weights_merged_in_the_forward
            weight = self.base.weight + merged
            return F.linear(x, weight, self.base.bias)

    down, up = nn.Parameter(torch.zeros(2, 128)), nn.Parameter(torch.zeros(64, 2))
    model = Adapted(base=nn.Linear(128, 64).requires_grad_(False), down=down, up=up)
    return model, (torch.zeros(4, 128, requires_grad=True),), {}


@planted("layer", ".1 is Linear(out_features=256), and was", "Sequential.1", "addmm")
def two_layers_of_a_sequence_otherwise(wrong: bool) -> Step:
    embedding = nn.Embedding(1000, 16, scale_grad_by_freq=wrong)
    return nn.Sequential(embedding, nn.Linear(16, 256 if wrong else 16)), (ids(),), {}


@planted("trained", "Probe.layers.1 is trained, and was frozen", "Probe", "")
def a_part_is_trained(wrong: bool) -> Step:
    class Probe(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).sigmoid()
            return self.head(x)

    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    layers[1].requires_grad_(wrong)
    return Probe(layers=layers, head=nn.Linear(64, 2)), (torch.zeros(256, 64),), {}


@planted("trained", "tower.position is trained, and was frozen", "Sequential.tower", "aten::", "")
def position_is_trained(wrong: bool) -> Step:
    class Tower(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + self.position).sigmoid()

    tower = Tower(layer=nn.Linear(64, 64), position=nn.Parameter(torch.zeros(64)))
    tower.requires_grad_(False).position.requires_grad_(wrong)
    model = nn.Sequential(OrderedDict(tower=tower, head=nn.Linear(64, 2)))
    return model, (torch.zeros(256, 64),), {}


@planted("checkpoint", ".* is checkpointed in 2 segments, and was in 4", "Segmented", "", "cpu")
def checkpoints_of_more_blocks(wrong: bool, device: str) -> None:
    """How many steps there are says nothing."""

    class Segmented(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for first in range(0, 8, self.size):
                x = checkpoint(self.some, first, x, use_reentrant=False)
            return x

        def some(self, first: int, x: Tensor) -> Tensor:
            return functools.reduce(lambda x, block: block(x), self.blocks[first:][: self.size], x)

    blocks = nn.ModuleList(Block() for _ in range(8))
    model = Segmented(blocks=blocks, size=4 if wrong else 2).to(device)
    for _ in range(2 if wrong else 1):
        model(torch.zeros(BATCH, LENGTH, WIDTH, device=device)).sum().backward()


@planted("recomputed", ", recomputed, are alive together", "Spanned.blocks.", "aten::", "")
def one_checkpoint_for_all(wrong: bool) -> Step:
    """What it computes anew is no module of the model, but the blocks in it are."""

    class Spanned(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            if not wrong:
                return super().forward(ids)
            blocks = nn.Sequential(*self.blocks)
            return self.head(checkpoint(blocks, self.embed(ids), use_reentrant=False))

    return Spanned(recompute=(0, 1, 2, 3)), (ids(),), {}


@planted("given", "aten::embedding, and was given [4, 1, 32]", "Last.head", "aten::addmm", "")
def every_position_at_last(wrong: bool) -> Step:
    """That the output is there is no news."""

    class Last(Parts):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(x if wrong else x[:, -1:])  # here: every_position_at_last

    model = Last(embed=nn.Embedding(WORDS, WIDTH), head=nn.Linear(WIDTH, 40 * WORDS))
    return model, (ids(),), {"backward": False}


@planted("earlier steps", "still alive: the list kept of kept_of_a_new_call", "", "aten::clone", "")
def kept_of_a_new_call(wrong: bool, device: str) -> None:
    """The module that is called for it is new, and keeps nothing."""
    model, kept = Decoder(depth=1).to(device), []
    for _ in range(5):
        words = ids().to(device)
        if wrong:
            hidden = model.embed(words).detach()
            kept.append(hidden.repeat(1, 1, 8).clone())  # here: kept_of_a_new_call
        cross_entropy(model(words)).backward()
        model.zero_grad()


@planted("held", ": layers.*.wide of made_once_and_kept", "", "float")
def made_once_and_kept(wrong: bool, device: str) -> None:
    """Of two calls the second makes nothing: the operator is called less often."""

    class Narrow(Parts):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.wide
            if wide is None:
                wide = self.narrow.float()  # here: made_once_and_kept
            if wrong:
                self.wide = wide
            return x @ wide

    narrow = torch.zeros(64, 64, dtype=torch.int8)
    layers = nn.ModuleList(Narrow(narrow=narrow.clone(), wide=None) for _ in range(4)).to(device)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(8, 64, device=device)
            for layer in layers:
                x = layer(x)


@planted("gradients recorded", "convs.{0-1} runs with gradients", "convs.{0-1}", "aten::conv")
def first_of_two_loops_with_gradients(wrong: bool) -> Step:
    """The second one stands for the same modules, and calls the same."""

    class Frozen(Parts):
        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(wrong):
                for conv, norm in zip(self.convs[:2], self.norms[:2], strict=True):
                    x = norm(conv(x)).relu_()  # here: first_of_two_loops_with_gradients
            for conv, norm in zip(self.convs[2:], self.norms[2:], strict=True):
                x = norm(conv(x)).relu_()
            return x.mean((2, 3))

    convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
    norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
    return Frozen(convs=convs, norms=norms), (torch.zeros(4, 8, 32, 32),), {}


@planted("library buffer", "cuBLAS keeps a buffer", "", "aten::mm", "cuda")
def library_asked_for_the_first_time(wrong: bool, device: str) -> None:
    x = torch.zeros(8, 8, device=device)
    x = x @ x if wrong else x * x  # here: library_asked_for_the_first_time


@planted("library buffer", "cuBLAS on another stream keeps a buffer", "", "aten::mm", "cuda")
def on_a_second_stream(wrong: bool, device: str) -> None:
    x = torch.zeros(8, 8, device=device)
    y = x @ x
    with torch.cuda.stream(torch.cuda.Stream() if wrong else None):
        y = x @ y  # here: on_a_second_stream


@planted("operators", "clamp", "Bank", "aten::clamp", "")
def exchanged_by_a_copy(wrong: bool) -> Step:
    """A buffer that is replaced lives on as its copy; what is computed of it grows."""

    class Bank(Parts):
        def forward(self, x: Tensor) -> Tensor:
            found = x @ (self.bank.clone() if wrong else self.bank).t()
            found = found.clamp(-1, 1) if wrong else found  # here: exchanged_by_a_copy
            self.bank = self.bank.roll(1, 0)
            return found.exp().sin()

    x = torch.zeros(128, 64, requires_grad=True)
    return Bank(bank=torch.zeros(512, 64)), (x,), {}


@planted("optimizer", "Adam 2 (loop) is another optimizer beside Adam", "", "zeros_like")
def optimizer_of_each_stage(wrong: bool, device: str) -> None:
    layer, optimizers = nn.Linear(64, 64), []
    for _ in range(2):
        if wrong or not optimizers:
            optimizers.append(torch.optim.Adam(layer.parameters()))
        layer(torch.zeros(8, 64)).sum().backward()
        optimizers[-1].step()  # here: optimizer_of_each_stage


# What must not be named: the rule, and a change that looks like its cause and is another.


def dropout_by_hand(wrong: bool) -> Step:
    """Another way of computing the same, and not an operator that is in place no more."""

    class Dropped(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if not wrong:
                return F.dropout(x, 0.1)
            kept = (torch.rand_like(x) > 0.1).float()
            return x * kept / 0.9

    return Dropped(linear=nn.Linear(32, 256)), (torch.zeros(128, 32),), {}


def skip_connection(wrong: bool) -> Step:
    """Joined tensors of four dimensions, and no cache."""

    class Unet(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.down(x)
            if not wrong:
                return self.plain(x)
            return self.up(torch.cat([x, F.relu(x)], 1)) + self.up(torch.cat([F.relu(x), x], 1))

    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    return Unet(down=conv(3, 16), up=conv(32, 4), plain=conv(16, 4)), (images(),), {}


def clone_kept_longer(wrong: bool) -> Step:
    """A copy that was made before, too, and is not what is new."""

    class Keeping(Parts):
        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x).clone()
            self.last = made if wrong else None
            return made.sum()

    return Keeping(linear=nn.Linear(32, 256)), (torch.zeros(128, 32),), {}


def larger_batch_of_vectors(wrong: bool) -> Step:
    """A table of pairs that was always one, of more of them."""
    options = {"loss_fn": lambda made: (made[:, None] - made[None]).square().mean()}
    return nn.Linear(8, 4), (torch.zeros(96 if wrong else 64, 8),), options


def weights_held_by_a_graph(wrong: bool) -> Step:
    """Settings that cost nothing changed beside what grew."""

    class Scaled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return torch.exp(torch.sin(x)) if wrong else torch.sin(x)

    model = Scaled(linear=nn.Linear(32, 256), dropout=nn.Dropout(0.2 if wrong else 0.1))
    return model.eval(), (torch.zeros(128, 32),), {}


def softmax_of_a_loss(wrong: bool) -> Step:
    """A softmax that no attention has, beside attention that is as it was."""
    options = {"loss_fn": lambda logits: (logits.softmax(-1) * logits if wrong else logits).sum()}
    return Decoder().bfloat16(), (ids(),), options


def keys_in_a_cache(wrong: bool) -> Step:
    """A cache of a fixed size, beside attention that takes a mask now: that costs little."""

    class Attends(Parts):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
            if not wrong:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mask = torch.ones(64, 64, dtype=torch.bool, device=x.device).tril()
            cache = x.new_zeros(2, 2, 4, 2048, 16)
            cache[:, :, :, :64] = torch.stack([k, v])
            return F.scaled_dot_product_attention(q, *cache[..., :64, :], mask)

    return Attends(qkv=nn.Linear(64, 192)).bfloat16(), (torch.zeros(2, 64, 64).bfloat16(),), {}


class Packed(torch.autograd.Function):
    """A linear layer of packed weights, which needs nothing but these in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wrong: Any) -> Tensor:
        kept = (x, weight) if wrong is True else (weight,)
        ctx.save_for_backward(*kept)  # here: saved_by_a_function
        ctx.x = x if wrong == "attribute" else None
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *_, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), None, None


@planted("saved by a function", "Packed saves ", "Layers.", "Packed.save_for_backward", "")
def saved_by_a_function(wrong: bool) -> Step:
    class Layer(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return Packed.apply(self.act(x) * 2, self.weight, wrong)

    layers = (Layer(weight=torch.zeros(64, 64), act=nn.Linear(64, 64)) for _ in range(2))
    return Layers(*layers), (torch.zeros(256, 64),), {}


@planted("held", "the graph of the list losses of kept_by_a_context", "", "aten::mul", "")
def kept_by_a_context(wrong: bool, device: str) -> None:
    """What is an attribute of a context lives as long as the graph of what was made with it."""
    layer, weight = nn.Linear(64, 64).to(device), torch.zeros(64, 64, device=device)
    losses = []
    for _ in range(3):
        made = layer(torch.zeros(256, 64, device=device)) * 2  # here: kept_by_a_context
        losses.append(Packed.apply(made, weight, "attribute" if wrong else False).sum())


@planted("freed late", "gradients of Sequential.{0-4} are no longer freed", "Sequential", "", "")
def step_after_the_backward(wrong: bool, device: str) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))).to(device)
    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in () if wrong else optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.zeros(64, 128, device=device)).sum().backward()
    for parameter in optimizers if wrong else ():
        step(parameter)


@planted("trained", "Frozen.stem is trained, and was frozen", "Frozen.stem", "aten::", "")
def stem_is_trained_in_training_mode(wrong: bool) -> Step:
    class Frozen(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x))

    stem = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.Tanh())
    model = Frozen(stem=stem, head=nn.Linear(128, 4))
    if not wrong:
        model.stem.requires_grad_(False).eval()
    return model, (torch.zeros(512, 32),), {}


@planted("checkpoint", "mlp is; Inward has inward=True, and had", "Inward.*", "aten::", "")
def checkpoint_moved_inward(wrong: bool) -> Step:
    class Layer(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.mix(x).sin().cos()  # here: checkpoint_moved_inward
            return checkpoint(self.mlp, x, use_reentrant=False) if wrong else self.mlp(x)

    class Inward(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) if self.inward else checkpoint(layer, x, use_reentrant=False)
            return x

    def layer() -> nn.Module:
        mlp = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        return Layer(mlp=mlp, mix=nn.Linear(32, 32))

    model = Inward(*(layer() for _ in range(4)))
    model.inward = wrong
    return model, (torch.zeros(256, 32),), {}


@planted("checkpoint", "is no longer checkpointed: it is in eval mode", "inner.", "aten::", "")
def checkpoint_ended_by_eval(wrong: bool) -> Step:
    class Switched(Parts):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.inner
            return checkpoint(inner, x, use_reentrant=False) if self.training else inner(x)

    parts = (nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(2))
    model = nn.Sequential(*(Switched(inner=part) for part in parts))
    return model.train(not wrong), (torch.zeros(256, 32),), {}


@planted("new tensor", "of no module, is new", "Adapted", "aten::mm")
def parameters_of_no_module(wrong: bool) -> Step:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for one in self.adapters:
                x = (x @ one.down) @ one.down.t()  # here: parameters_of_no_module
            return x

    model = Adapted(64, 64)
    adapter = SimpleNamespace(down=nn.Parameter(torch.zeros(64, 256)))
    model.adapters = [adapter] if wrong else []
    return model, (torch.zeros(16, 64),), {}


def one_number_more(wrong: bool) -> Step:
    """A mask that is a little longer does not explain what a list keeps."""
    kept: list[Tensor] = []

    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            made = super().forward(x).relu() + mask.sum()
            if wrong:
                kept.append(made * 2)
            return made

    return Masked(64, 64), (torch.zeros(256, 64), torch.zeros(513 if wrong else 512)), {}


@planted("float64", "float64 comes from made.double", "Widened", "made.double (aten")
def wider_by_little_and_in_float64(wrong: bool) -> Step:
    class Widened(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            made = made.double() if wrong else made  # here: wider_by_little_and_in_float64
            return made.sin().mean()

    return Widened(64, 66 if wrong else 64), (torch.zeros(512, 64),), {}


def more_pairs(wrong: bool) -> Step:
    """More boxes, whose pairs with others are broadcast as they were."""

    class Boxes(Parts):
        def forward(self, x: Tensor) -> Tensor:
            boxes = self.boxes(x).view(-1, 1, 4)
            return torch.maximum(boxes, boxes[:50].view(1, -1, 4)).square().sum()

    return Boxes(boxes=nn.Linear(8, 48 if wrong else 16)), (torch.zeros(64, 8),), {}


@planted("held", "in the forward: Tables.grid", "Tables", "aten::mul", "")
def property_that_is_cached(wrong: bool) -> Step:
    class Tables(Parts):
        def table(self) -> Tensor:
            ones = torch.ones(512, device=self.weight.device)
            return torch.outer(ones, ones)  # here: property_that_is_cached

        grid = functools.cached_property(table) if wrong else property(table)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.grid.mean() * self.weight

    if wrong:
        Tables.grid.__set_name__(Tables, "grid")
    return Tables(weight=nn.Parameter(torch.ones(64))), (torch.zeros(2048, 64),), {}


@planted("held", "the program keeps parameters: SimpleNamespace.teacher", "", "weight", "")
def teacher_that_stays(wrong: bool, device: str) -> None:
    parts = SimpleNamespace(teacher=nn.Linear(256, 2048).to(device))  # here: teacher_that_stays
    with torch.no_grad():
        known = parts.teacher(torch.ones(512, 256, device=device)).mean()
    if not wrong:
        parts.teacher = None
    student = nn.Linear(512, 512).to(device)
    (student(torch.ones(4096, 512, device=device)) - known).square().mean().backward()


@planted("inputs", "[64, 64] → [256, 64], in 1 call instead of 4", "Sequential", "", "")
def batches_not_split(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    for part in torch.ones(256, 64, device=device).chunk(1 if wrong else 4):
        model(part).square().mean().backward()  # here: batches_not_split


@planted("layer", "*.act is ReLU(inplace=False), and was ReLU(inplace=True)", "layers", "relu", "")
def renamed_and_not_in_place(wrong: bool) -> Step:
    class Layer(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.fc(x))  # here: renamed_and_not_in_place

    class Stack(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return (self.layers if wrong else self.blocks)(x)

    act = partial(nn.ReLU, inplace=not wrong)
    layers = nn.Sequential(*(Layer(fc=nn.Linear(64, 64), act=act()) for _ in range(3)))
    return Stack(**{"layers" if wrong else "blocks": layers}), (torch.zeros(256, 64),), {}


@planted("float64", "float64 comes from x.double", "Stack.fc", "x.double (aten::_to_copy)", "")
def moved_into_a_module_and_widened(wrong: bool) -> Step:
    class Inner(Parts):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.double().sin()  # here: moved_into_a_module_and_widened
            return self.up(x).tanh().mean() * wide.mean()

    class Stack(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if wrong else self.up(x).tanh().mean()

    up = nn.Linear(64, 64)
    return Stack(fc=Inner(up=up)) if wrong else Stack(up=up), (torch.zeros(512, 64),), {}


@planted("copy", "kept by the list seen of copies_that", "", "made.float (aten::_to_copy)", "")
def copies_that_are_kept(wrong: bool, device: str) -> None:
    model, seen = nn.Linear(64, 64).to(device).bfloat16(), []
    with torch.no_grad():
        for _ in range(3):
            made = model(torch.zeros(256, 64, device=device).bfloat16())
            seen.append(made.float() if wrong else 0)  # here: copies_that_are_kept


@planted("operators", "silu (float32[256, 64]) in the place of relu_", "Acting", "aten::silu", "")
def another_activation(wrong: bool) -> Step:
    class Acting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (F.silu if wrong else F.relu_)(super().forward(x))  # here: another_activation

    return Acting(64, 64), (torch.zeros(256, 64),), {}


@planted("operators", "in the place of mean, kept by the list seen of", "", "aten::tanh", "")
def scores_that_are_kept(wrong: bool, device: str) -> None:
    model, seen = nn.Linear(64, 64).to(device), []
    with torch.no_grad():
        for _ in range(3):
            made = model(torch.zeros(256, 64, device=device))
            seen.append(made.tanh() if wrong else made.mean())  # here: scores_that_are_kept


@planted("operators", "in the place of _fused_rms_norm", "Normed.norm", "aten::_to_copy", "cuda")
def norm_in_float32(wrong: bool) -> Step:
    class Norm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            if not wrong:
                return super().forward(x)
            y = x.float()  # here: norm_in_float32
            return (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    class Normed(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x + self.shift))

    parts = Normed(linear=nn.Linear(64, 64), norm=Norm(64), shift=nn.Parameter(torch.zeros(64)))
    return parts.bfloat16(), (torch.zeros(256, 64).bfloat16(),), {}


@planted("loss", "_log_softmax) is called 3 times, and was twice", "Distilled", "F.cross_", "")
def hard_targets(wrong: bool) -> Step:
    class Distilled(Parts):
        def forward(self, x: Tensor) -> Tensor:
            soft = F.log_softmax(self.student(x), -1)
            with torch.no_grad():
                wanted = F.log_softmax(self.teacher(x), -1)
            hard = 0.0
            if wrong:
                hard = F.cross_entropy(self.student(x), wanted.argmax(-1))  # here: hard_targets
            return F.kl_div(soft, wanted, log_target=True, reduction="sum") + hard

    model = Distilled(student=nn.Linear(16, 512), teacher=nn.Linear(16, 512))
    return model, (torch.zeros(256, 16),), {}


@planted("elsewhere", "kept by the dict adapters of all_adapters", "", "randn", "cuda")
def all_adapters(wrong: bool, device: str) -> None:
    """All that are loaded stand on the GPU; one of them is in use, too."""
    adapters = {}
    for name in "abcdef":
        own = device if wrong else "cpu"
        adapters[name] = torch.randn(64, 32, device=own)  # here: all_adapters
    for each in adapters.values():
        used = each.to(device)
        torch.ones(16, 64, device=device) @ used


def no_longer_reentrant(wrong: bool) -> Step:
    """A checkpoint that runs its forward with gradients, and keeps as little as before."""

    class Stage(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            x = checkpoint(self.act, x, use_reentrant=not wrong)
            return (torch.exp(x) if wrong else x).sum()

    model = Stage(linear=nn.Linear(64, 64), act=nn.Sequential(nn.Tanh(), nn.Sigmoid()))
    return model, (torch.zeros(512, 64),), {}


def one_position_more_in_a_copy(wrong: bool) -> Step:
    """What a layer is given is hardly larger, and its output is copied."""

    class Head(Parts):
        def forward(self, x: Tensor) -> Tensor:
            logits = self.head(x)[:, 1:] if wrong else self.head(x[:, 1:])
            return F.cross_entropy(logits.reshape(-1, 512), logits.argmax(-1).flatten())

    return Head(head=nn.Linear(8, 512)), (torch.zeros(4, 129, 8),), {}


def masked_with_numbers(wrong: bool) -> Step:
    """A mask is expanded where it is used, which makes no matrix of vectors."""

    class Masking(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            every = mask[None, None].expand(len(x), 4, -1, -1)
            chosen = torch.where(every, 0.0, -1.0) if wrong else x.new_zeros(1)
            return x + chosen

    mask = torch.ones(64, 64, dtype=torch.bool)
    return Masking(), (torch.zeros(8, 4, 64, 64, requires_grad=True), mask), {}


def products_kept_for_a_backward(wrong: bool) -> Step:
    """The same vectors were broadcast before, and the matrix was freed before the peak."""

    class Slopes(Parts):
        def forward(self, x: Tensor) -> Tensor:
            slope = self.up.weight.sum() if wrong else self.up.weight.sum().detach()
            loss = ((x[:, :1] - x[:, 0]) * slope).sum()
            return loss + self.up(x).sin().exp().sum()

    return Slopes(up=nn.Linear(4, 2048)), (torch.zeros(512, 4),), {}


def _batch(size: int) -> Tensor:
    return torch.randn(size, 64)


def _validate(model: nn.Module, size: int) -> None:
    with torch.no_grad():
        model(_batch(size)).sum()  # here: validated_with_more


@planted("inputs", "input of Sequential changed, float32[64, 64] → float32[2048, 64]", device="")
def validated_with_more(wrong: bool, device: str) -> None:
    """The batch of the validation: the same function makes that of the training."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        model(_batch(256)).sum().backward()
        _validate(model, 2048 if wrong else 64)  # outer: validated_with_more


@planted("type", "beginning with the parameter Sequential.*.down.weight", "Sequential", "", "cpu")
def adapters_in_float32(wrong: bool) -> Step:
    """What is converted for them is much larger than they are."""

    class Adapted(Parts):
        def forward(self, x: Tensor) -> Tensor:
            low = self.down(x.to(self.down.weight.dtype))  # here: adapters_in_float32
            return self.base(x) + self.up(low).to(x.dtype)

    layers = [
        Adapted(
            base=nn.Linear(256, 256).bfloat16().requires_grad_(False),
            down=nn.Linear(256, 4, bias=False, dtype=torch.float32 if wrong else torch.bfloat16),
            up=nn.Linear(4, 256, bias=False, dtype=torch.float32 if wrong else torch.bfloat16),
        )
        for _ in range(2)
    ]
    return nn.Sequential(*layers), (torch.zeros(512, 256, dtype=torch.bfloat16),), {}


@planted("given", "Last.norm is given [8, 32, 64] of aten::relu, and was given [8, 1, 64]")
def head_on_all_positions(wrong: bool) -> Step:
    class Last(Parts):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            return self.head(self.norm(x if wrong else x[:, -1:]))  # here: head_on_all_positions

    parts = {"first": nn.Linear(64, 64), "norm": nn.LayerNorm(64), "head": nn.Linear(64, 2048)}
    return Last(**parts), (torch.zeros(8, 32, 64),), {}


NOT_THE_CAUSE = {
    products_kept_for_a_backward: {"broadcast"},
    one_number_more: {"inputs"},
    masked_with_numbers: {"broadcast"},
    one_position_more_in_a_copy: {"given"},
    no_longer_reentrant: {"gradients recorded"},
    dropout_by_hand: {"in place"},
    softmax_of_a_loss: {"attention"},
    keys_in_a_cache: {"attention"},
    more_pairs: {"broadcast"},
    skip_connection: {"cache"},
    clone_kept_longer: {"copy"},
    larger_batch_of_vectors: {"broadcast", "lives longer"},
    weights_held_by_a_graph: {"layer", "lives longer", "copy"},
}
