"""Language models: peft's adapters, x-transformers, quantised codes, recurrent blocks, CLIP."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.libraries.registry import Step, register

_ATTENTION = ["q_proj", "v_proj"]
#: By name, what makes an adapter's configuration of peft's module.
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda peft: peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=_ATTENTION
    ),
    "DoRA": lambda peft: peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=_ATTENTION
    ),
    "IA3": lambda peft: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=[*_ATTENTION, "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "prompt tuning": lambda peft: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5
    ),
    "prefix tuning": lambda peft: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5
    ),
    "LoHa": lambda peft: peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=_ATTENTION),
    "OFT": lambda peft: peft.OFTConfig(
        task_type="CAUSAL_LM", r=0, oft_block_size=4, target_modules=_ATTENTION
    ),
    "VeRA": lambda peft: peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=_ATTENTION),
}


def _adapted(name: str) -> Step:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
    )
    ids = torch.arange(32).reshape(2, 16)
    model = peft.get_peft_model(LlamaForCausalLM(config), ADAPTERS[name](peft))
    return Step(model, (), {"input_ids": ids, "labels": ids})


for _name in ADAPTERS:
    register(f"peft/{_name}")(lambda name=_name: _adapted(name))


@register("peft/LoRA, checkpointed")
def _checkpointed() -> Step:
    step = _adapted("LoRA")
    step.model.enable_input_require_grads()  # type: ignore[operator]
    step.model.gradient_checkpointing_enable()  # type: ignore[operator]
    return step


@register("x-transformers/decoder")
def _decoder() -> Step:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True)
    wrapped = TransformerWrapper(num_tokens=200, max_seq_len=64, attn_layers=layers)
    ids = torch.randint(0, 200, (2, 33))
    return Step(AutoregressiveWrapper(wrapped), (ids,), loss_fn=lambda output: output)


@register("x-transformers/ALiBi, gated")
def _alibi() -> Step:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, alibi_pos_bias=True, ff_glu=True, use_rmsnorm=True)
    model = TransformerWrapper(num_tokens=200, max_seq_len=64, attn_layers=layers)
    return Step(model, (torch.randint(0, 200, (2, 32)),))


@register("x-transformers/encoder-decoder")
def _both() -> Step:
    from x_transformers import XTransformer

    sides = {
        f"{side}_{name}": value
        for side in ("enc", "dec")
        for name, value in {"num_tokens": 100, "depth": 2, "heads": 4, "max_seq_len": 64}.items()
    }
    ids = torch.randint(0, 100, (2, 2, 32))
    return Step(XTransformer(dim=64, **sides), (ids[0], ids[1]), loss_fn=lambda output: output)


def _with_codes(model: nn.Module, width: int) -> Step:
    x = torch.randn(2, 20, width, requires_grad=True)
    return Step(model, (x,), loss_fn=lambda output: output[0].sum(), optimizer=None)


@register("vector-quantize-pytorch/VectorQuantize")
def _codes() -> Step:
    from vector_quantize_pytorch import VectorQuantize

    return _with_codes(VectorQuantize(dim=32, codebook_size=64), 32)


@register("vector-quantize-pytorch/ResidualVQ")
def _residual_codes() -> Step:
    from vector_quantize_pytorch import ResidualVQ

    return _with_codes(ResidualVQ(dim=32, codebook_size=64, num_quantizers=3), 32)


@register("vector-quantize-pytorch/FSQ")
def _finite_codes() -> Step:
    from vector_quantize_pytorch import FSQ

    return _with_codes(FSQ(levels=[8, 5, 5, 5]), 4)


_VIT: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 16,
    "num_classes": 10,
    "dim": 64,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 128,
}


@register("vit-pytorch/ViT")
def _classifier() -> Step:
    from vit_pytorch import ViT

    return Step(ViT(dropout=0.1, **_VIT), (torch.randn(2, 3, 64, 64),))


@register("vit-pytorch/NaViT")
def _of_all_sizes() -> Step:
    from vit_pytorch.na_vit import NaViT

    model = NaViT(**_VIT)
    images = [[torch.randn(3, 64, 64), torch.randn(3, 32, 64)], [torch.randn(3, 48, 48)]]
    return Step(model, (images,))


@register("performer-pytorch/Performer")
def _performer() -> Step:
    from performer_pytorch import Performer

    return Step(Performer(dim=64, depth=2, heads=4, dim_head=16), (torch.randn(2, 64, 64),))


@register("open_clip/CLIP")
def _clip() -> Step:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    images = CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=16, image_size=64)
    text = CLIPTextCfg(context_length=20, vocab_size=100, width=64, heads=4, layers=2)
    inputs = torch.randn(2, 3, 64, 64), torch.randint(0, 100, (2, 20))
    return Step(
        CLIP(64, images, text), inputs, loss_fn=lambda output: sum(x.sum() for x in output[:2])
    )


@register("xlstm/mLSTM")
def _mlstm() -> Step:
    import xlstm

    layer = xlstm.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4)
    config = xlstm.xLSTMBlockStackConfig(
        mlstm_block=xlstm.mLSTMBlockConfig(mlstm=layer),
        context_length=32,
        num_blocks=2,
        embedding_dim=32,
    )
    return Step(xlstm.xLSTMBlockStack(config), (torch.randn(2, 32, 32),))


@register("lightning/LightningModule")
def _lightning() -> Step:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x)
            return result

    return Step(Module(), (torch.randn(4, 64),))
