"""Models of transformers for pictures, sound and series: one step of training each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

from benchmarks.programs_of_others.drivers.tiny import SMALL
from benchmarks.programs_of_others.drivers.vision import device

VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def boxes() -> list[dict[str, torch.Tensor]]:
    """Return what a detector has to find in two pictures."""
    return [
        {
            "class_labels": torch.tensor([0, 2], device=device()),
            "boxes": torch.rand(2, 4, device=device()) * 0.5 + 0.2,
        }
        for _ in range(2)
    ]


def images(size: int = 32) -> torch.Tensor:
    """Return two pictures."""
    return torch.randn(2, 3, size, size, device=device())


def train(kind: str) -> Callable[[], None]:
    """Train the model for a step; speech is only made."""

    def program() -> None:
        output = globals()[kind.replace("-", "_")]()
        if output is not None:
            output.loss.backward()
            print(output.loss.item())

    return program


def vit_mae() -> Any:
    """Return the output of vit-mae."""
    config = t.ViTMAEConfig(
        **VIT,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )
    return t.ViTMAEForPreTraining(config).to(device())(images())


def swin() -> Any:
    """Return the output of swin."""
    config = t.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    )
    return t.SwinForImageClassification(config).to(device())(
        images(), labels=torch.tensor([0, 1], device=device())
    )


def detr() -> Any:
    """Return the output of detr."""
    backbone = t.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    config = t.DetrConfig(
        use_timm_backbone=False,
        backbone_config=backbone,
        backbone=None,
        use_pretrained_backbone=False,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_queries=6,
        num_labels=3,
    )
    return t.DetrForObjectDetection(config).to(device())(images(64), labels=boxes())


def segformer() -> Any:
    """Return the output of segformer."""
    config = t.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[4, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    return t.SegformerForSemanticSegmentation(config).to(device())(
        images(), labels=torch.randint(0, 3, (2, 32, 32), device=device())
    )


def mask2former() -> Any:
    """Return the output of mask2former."""
    backbone = t.SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = t.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        train_num_points=16,
        num_labels=3,
    )
    return t.Mask2FormerForUniversalSegmentation(config).to(device())(
        images(64),
        mask_labels=[torch.ones(2, 64, 64, device=device()) for _ in range(2)],
        class_labels=[torch.tensor([0, 1], device=device()) for _ in range(2)],
    )


def clip() -> Any:
    """Return the output of clip."""
    words = {**SMALL, "max_position_embeddings": 32}
    config = t.CLIPConfig(text_config=words, vision_config=VIT, projection_dim=16)
    ids = torch.randint(7, 23, (2, 8), device=device())
    return t.CLIPModel(config).to(device())(input_ids=ids, pixel_values=images(), return_loss=True)


def wav2vec2_ctc() -> Any:
    """Return the output of wav2vec2-ctc."""
    config = t.Wav2Vec2Config(
        vocab_size=23,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_length=2,
    )
    return (
        t.Wav2Vec2ForCTC(config)
        .to(device())
        .train()(
            torch.randn(2, 4000, device=device()),
            labels=torch.randint(1, 20, (2, 5), device=device()),
        )
    )


def wav2vec2_pretraining() -> Any:
    """Return the output of wav2vec2-pretraining."""
    config = t.Wav2Vec2Config(
        vocab_size=23,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        proj_codevector_dim=16,
        codevector_dim=16,
        num_codevectors_per_group=4,
    )
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        _compute_mask_indices,
        _sample_negative_indices,
    )

    model = t.Wav2Vec2ForPreTraining(config).to(device()).train()
    length = model._get_feat_extract_output_lengths(4000).item()
    mask = _compute_mask_indices((2, length), 0.2, 2)
    negatives = _sample_negative_indices((2, length), 4, mask)
    return model(
        torch.randn(2, 4000, device=device()),
        mask_time_indices=torch.tensor(mask, device=device()),
        sampled_negative_indices=torch.tensor(negatives, device=device()),
    )


def vits() -> Any:
    """Return the output of vits."""
    config = t.VitsConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        flow_size=16,
        spectrogram_bins=17,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3, 5]],
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2,
    )
    with torch.no_grad():
        print(
            t.VitsModel(config)
            .to(device())
            .eval()(torch.randint(1, 20, (1, 6), device=device()))
            .waveform.shape
        )
    return None


def patchtst() -> Any:
    """Return the output of patchtst."""
    config = t.PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        prediction_length=4,
    )
    return t.PatchTSTForPrediction(config).to(device())(
        past_values=torch.randn(2, 16, 2, device=device()),
        future_values=torch.randn(2, 4, 2, device=device()),
    )
