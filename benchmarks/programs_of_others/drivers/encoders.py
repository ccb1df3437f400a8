"""Models of transformers for pictures, sound and series: one step of training each."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as t

from benchmarks.programs_of_others.drivers.tiny import settings
from benchmarks.programs_of_others.drivers.vision import device


def boxes() -> list[dict[str, torch.Tensor]]:
    """Return what a detector has to find in two pictures."""
    return [
        {"class_labels": numbers(0, 2), "boxes": torch.rand(2, 4, device=device()) * 0.5 + 0.2}
        for _ in range(2)
    ]


def images(size: int = 32) -> torch.Tensor:
    """Return two pictures."""
    return torch.randn(2, 3, size, size, device=device())


def numbers(*found: int) -> torch.Tensor:
    """Return these numbers on the device."""
    return torch.tensor(found, device=device())


def drawn(least: int, most: int, *shape: int) -> torch.Tensor:
    """Return numbers of a range."""
    return torch.randint(least, most, shape, device=device())


def build(model: Any, kind: str, **more: Any) -> Any:
    """Return a model of a class, from a tiny configuration."""
    return model(model.config_class(**settings(kind), **more)).to(device())


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
    return build(t.ViTMAEForPreTraining, "vit-mae")(images())


def swin() -> Any:
    """Return the output of swin."""
    return build(t.SwinForImageClassification, "swin")(images(), labels=numbers(0, 1))


def detr() -> Any:
    """Return the output of detr."""
    backbone = t.ResNetConfig(**settings("resnet"))
    model = build(t.DetrForObjectDetection, "detr", backbone_config=backbone)
    return model(images(64), labels=boxes())


def segformer() -> Any:
    """Return the output of segformer."""
    model = build(t.SegformerForSemanticSegmentation, "segformer")
    return model(images(), labels=drawn(0, 3, 2, 32, 32))


def mask2former() -> Any:
    """Return the output of mask2former."""
    backbone = t.SwinConfig(**settings("swin-stages"))
    kind = t.Mask2FormerForUniversalSegmentation
    masks = [torch.ones(2, 64, 64, device=device()) for _ in range(2)]
    classes = [numbers(0, 1) for _ in range(2)]
    model = build(kind, "mask2former", backbone_config=backbone)
    return model(images(64), mask_labels=masks, class_labels=classes)


def clip() -> Any:
    """Return the output of clip."""
    words = {**settings("small"), "max_position_embeddings": 32}
    config = t.CLIPConfig(text_config=words, vision_config=settings("vit"), projection_dim=16)
    ids = drawn(7, 23, 2, 8)
    return t.CLIPModel(config).to(device())(input_ids=ids, pixel_values=images(), return_loss=True)


def wav2vec2_ctc() -> Any:
    """Return the output of wav2vec2-ctc."""
    model = build(t.Wav2Vec2ForCTC, "wav2vec2-ctc").train()
    return model(torch.randn(2, 4000, device=device()), labels=drawn(1, 20, 2, 5))


def wav2vec2_pretraining() -> Any:
    """Return the output of wav2vec2-pretraining."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        _compute_mask_indices,
        _sample_negative_indices,
    )

    model = build(t.Wav2Vec2ForPreTraining, "wav2vec2-pretraining").train()
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
    with torch.no_grad():
        print(build(t.VitsModel, "vits").eval()(drawn(1, 20, 1, 6)).waveform.shape)


def patchtst() -> Any:
    """Return the output of patchtst."""
    past, future = (torch.randn(2, length, 2, device=device()) for length in (16, 4))
    model = build(t.PatchTSTForPrediction, "patchtst")
    return model(past_values=past, future_values=future)
