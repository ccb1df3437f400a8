"""Regressions planted in models of transformers, and in the loops that train them.

Each is built as it was and as it is; a comment «here: <name>» marks the line that is to blame.
"""

import copy
import importlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnosis.planted import Step
from tests.diagnosis.planted import planted as planted_in

WORDS, WIDTH, BATCH, LENGTH = 320, 32, 4, 64
planted = partial(planted_in, imports="transformers")


def library() -> Any:
    """Return transformers, imported when first used: each worker of a run collects this module."""
    return importlib.import_module("transformers")


def ids(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def llama(**settings: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": WORDS}
    config = library().LlamaConfig(**{**sizes, **heads, "use_cache": False, **settings})
    return library().LlamaForCausalLM(config)


def gpt2(**settings: Any) -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 128}
    config = library().GPT2Config(**{**sizes, "use_cache": False, **settings})
    return library().GPT2LMHeadModel(config)


def bert(**settings: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    config = library().BertConfig(
        **{**sizes, "num_attention_heads": 4, "vocab_size": WORDS, **settings}
    )
    return library().BertModel(config)


def vit(**settings: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    config = library().ViTConfig(
        **{**sizes, "num_attention_heads": 4, "image_size": 64, "patch_size": 8, **settings}
    )
    return library().ViTModel(config)


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    return library().T5ForConditionalGeneration(
        library().T5Config(**sizes, vocab_size=WORDS, decoder_start_token_id=0)
    )


@planted("checkpoint", "is no longer checkpointed", "GPT2LMHeadModel.transformer.h.", "aten::")
def checkpointing_off(wrong: bool, device: str) -> None:
    model = gpt2().to(device).train()
    if not wrong:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(ids().to(device)).logits.sum().backward()  # here: checkpointing_off


@planted("autocast", "BertModel runs without autocast", "BertModel", "aten::")
def autocast_left(wrong: bool, device: str) -> None:
    model = bert().to(device)
    with nullcontext() if wrong else torch.autocast(device, dtype=torch.bfloat16):
        made = model(ids().to(device)).last_hidden_state  # here: autocast_left
    made.float().sum().backward()


@planted("tied", "is no longer tied to", "GPT2LMHeadModel.lm_head", "aten::")
def weights_untied(wrong: bool, device: str) -> None:
    model = gpt2(n_layer=1, vocab_size=2000)
    if wrong:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids(1, 8).to(device)).logits.sum().backward()  # here: weights_untied
    optimizer.step()


@planted("gradients kept", "gradients of an earlier backward are alive in the", "", "aten::")
def gradients_not_set_to_none(wrong: bool, device: str) -> None:
    model = bert(vocab_size=1000).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=not wrong)
        made = model(ids().to(device))
        made.last_hidden_state.sum().backward()
        optimizer.step()


@planted("earlier steps", "are still alive: the graph of the variable total", "", "aten::")
def losses_added_up(wrong: bool, device: str) -> None:
    model, total = gpt2(n_layer=1).to(device), torch.zeros((), device=device)
    for _ in range(3):
        loss = model(ids().to(device), labels=ids().to(device)).loss
        loss.backward(retain_graph=True)
        total = total + (loss if wrong else loss.detach())


@planted("settings", "has attention eager, and had attention sdpa", "BertModel", "aten::")
def another_attention(wrong: bool) -> Step:
    model = bert(attn_implementation="eager" if wrong else "sdpa").eval()
    return model, (ids(),), {"loss_fn": lambda made: made.last_hidden_state.sum()}


@planted("training mode", "is in training mode, and was in eval mode", "BertModel", "aten::")
def not_in_eval(wrong: bool) -> Step:
    model = bert(hidden_dropout_prob=0.5).train(wrong)
    return model, (ids(),), {"loss_fn": lambda made: made.last_hidden_state.sum()}


@planted("inputs", "input 0 float32[4, 3, 64, 64] → [4, 3, 128, 128]", "ViTModel", "aten::")
def larger_images(wrong: bool) -> Step:
    size = 128 if wrong else 64
    images = torch.zeros(BATCH, 3, size, size)
    return vit(image_size=size), (images,), {"loss_fn": lambda made: made[0].sum()}


@planted("new module", "model.layers.2 is new", "LlamaForCausalLM.model.layers.2", "aten::")
def another_layer(wrong: bool) -> Step:
    return llama(num_hidden_layers=3 if wrong else 2), (ids(),), {}


@planted("optimizer", "the optimizer is AdamW (", "", "aten::")
def another_optimizer(wrong: bool) -> Step:
    optimizer = torch.optim.AdamW if wrong else torch.optim.SGD
    return gpt2(), (ids(1, 8),), {"optimizer": optimizer}


@planted("held between", ": average.embeddings.", "", "aten::clone")
def average_of_the_weights(wrong: bool, device: str) -> None:
    model, average = bert().to(device), None
    for _ in range(2):
        model(ids().to(device)).last_hidden_state.sum().backward()
        model.zero_grad()
        if wrong:
            average = copy.deepcopy(model)  # here: average_of_the_weights
    del average


@planted("broadcast", "broadcasting [128, 1] with [1, 128]", "", "aten::mse_loss")
def matrix_of_differences(wrong: bool, device: str) -> None:
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Flatten(), nn.Linear(16, 1)).to(device)
    values = model(ids(128, 2).to(device))
    wanted = torch.zeros(128, device=device)
    made = values if wrong else values[:, 0]
    F.mse_loss(made, wanted).backward()  # here: matrix_of_differences


@planted("checkpoint", "transformer.h.2 is no longer checkpointed", "transformer.h.2", "aten::")
def one_block_without_checkpoint(wrong: bool, device: str) -> None:
    model = gpt2(n_layer=4, n_head=1).to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.transformer.h[2].gradient_checkpointing = not wrong
    model(ids().to(device)).logits.sum().backward()


@planted("cache", "keys and values is kept in training", "LlamaForCausalLM.model.layers.*", "cat")
def cache_in_training(wrong: bool) -> Step:
    model = llama(use_cache=wrong, attn_implementation="eager", num_hidden_layers=4)
    return model, (ids(),), {"loss_fn": lambda made: made.logits.sum()}


@planted("type", "bfloat16 became float32 from", "DenseReluDense.wo", "weight")
def layers_kept_in_float32(wrong: bool, device: str) -> None:
    model = t5().bfloat16().to(device)
    for name, module in model.named_modules():
        if wrong and name.endswith(".wo"):
            module.float()  # here: layers_kept_in_float32
    words, labels = ids().to(device), ids(BATCH, 8).to(device)
    model(input_ids=words, labels=labels).loss.backward()


@planted("held", "the list kept of layers_kept_for_a", "BertModel.encoder.layer.*", "aten::clone")
def layers_kept_for_a_probe(wrong: bool, device: str) -> None:
    model, kept = bert(num_hidden_layers=4).to(device), []

    def keep(module: nn.Module, given: Any, made: Any) -> None:
        hidden = made if isinstance(made, Tensor) else made[0]
        if wrong:
            kept.append(hidden.detach().clone())  # here: layers_kept_for_a_probe

    for layer in model.encoder.layer:
        layer.register_forward_hook(keep)
    model(ids().to(device)).last_hidden_state.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


class Residual(nn.Module):
    """A block of a ResNet, as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return self.relu(out)


class Detector(nn.Module):
    """A backbone, a pyramid, proposals, their matching with boxes, and losses: as torchvision's."""

    def __init__(self, matches_with_a_graph: bool) -> None:
        super().__init__()
        self.matches_with_a_graph = matches_with_a_graph
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Residual() for _ in range(3)))
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.scores, self.boxes = nn.Conv2d(16, 3, 1), nn.Conv2d(16, 12, 1)

    def forward(self, images: Tensor, wanted: list[Tensor]) -> Tensor:
        fine = self.blocks(self.stem(images))
        levels = [fine, self.down(fine)]
        scores = torch.cat([self.scores(one).flatten(1) for one in levels], 1)
        boxes = [
            self.boxes(one).flatten(2).transpose(1, 2).reshape(len(one), -1, 4) for one in levels
        ]
        losses = []
        for given, own, some in zip(scores, torch.cat(boxes, 1), wanted, strict=True):
            with torch.set_grad_enabled(self.matches_with_a_graph):
                match = overlap(own, some).amax(1)
            chosen = given.topk(100).indices
            pairs = own[chosen][:, None] - own[chosen]
            losses.append(F.l1_loss(given, match) + pairs.square().mean())
        return sum(losses)


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    least = torch.maximum(boxes[:, None, :2], others[:, :2])
    most = torch.minimum(boxes[:, None, 2:], others[:, 2:])
    return (most - least).clamp(min=0).prod(-1)


@planted("recorded", "autograd records", "Detector", "aten::", "cpu")
def boxes_matched_with_a_graph(wrong: bool) -> Step:
    wanted = [torch.ones(32, 4) for _ in range(2)]
    return Detector(wrong), (torch.zeros(2, 3, 64, 64), wanted), {}
