"""Regressions planted in models of transformers, and in the loops that train them."""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.diagnosis.planted import Step
from tests.diagnosis.planted import planted as planted_in

WORDS, WIDTH, BATCH, LENGTH = 320, 32, 4, 64
planted = partial(planted_in, imports="transformers", device="")


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
    sizes |= {"num_attention_heads": 4, "vocab_size": WORDS, **settings}
    return library().BertModel(library().BertConfig(**sizes))


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    config = library().T5Config(**sizes, vocab_size=WORDS, decoder_start_token_id=0)
    return library().T5ForConditionalGeneration(config)


@planted("checkpoint", "is no longer checkpointed", "GPT2LMHeadModel.transformer.h.", "aten::")
def checkpointing_off(wrong: bool, device: str) -> None:
    model = gpt2().to(device).train()
    if not wrong:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(ids().to(device)).logits.sum().backward()  # here: checkpointing_off


@planted("training mode", "is in training mode, and was in eval mode", "BertModel", "aten::")
def not_in_eval(wrong: bool) -> Step:
    model = bert(hidden_dropout_prob=0.5).train(wrong)
    return model, (ids(),), {"loss_fn": lambda made: made.last_hidden_state.sum()}


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


@planted("type", "bfloat16 became float32, beginning with", "DenseReluDense.wo", "weight")
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
