"""Small models of the architectures in ``transformers``, built from configs with random weights.

``architectures.json`` has them by family: the model's class, the settings of its config (``like``:
those that several share), and what it is called with, where that is not what is usual.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1000
BATCH, LENGTH = 2, 48
IMAGE = 64

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of ``transformers``, settings to shrink it, and what it is called with."""

    model: str
    settings: dict[str, Any]
    inputs: str

    def build(self) -> tuple[torch.nn.Module, Inputs]:
        """Return the model in training mode and its keyword arguments."""
        import transformers

        model = getattr(transformers, self.model)
        built: torch.nn.Module = model(model.config_class(**self.settings))
        inputs: Inputs = globals()[self.inputs]()
        return built.train(), inputs


def tokens() -> torch.Tensor:
    """Return token ids without the low ones, which are special to many models."""
    return torch.randint(10, VOCABULARY, (BATCH, LENGTH))


def causal() -> Inputs:
    """Return what a language model is trained on."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> Inputs:
    """Return what a masked language model is trained on, padding included."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def unlabelled() -> Inputs:
    """Return token ids for models without a head."""
    return {"input_ids": tokens()}


def translated() -> Inputs:
    """Return a source and a target text."""
    return {"input_ids": tokens(), "labels": tokens()}


def classified_images() -> Inputs:
    """Return images and their classes."""
    return {
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE),
        "labels": torch.tensor([0, 1][:BATCH]),
    }


def images() -> Inputs:
    """Return images."""
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)}


def segmented_images() -> Inputs:
    """Return images and a class for every pixel."""
    return {**images(), "labels": torch.randint(0, 2, (BATCH, IMAGE, IMAGE))}


def transcript() -> torch.Tensor:
    """Return the token ids of what is said."""
    return tokens()[:, :20].contiguous()


def waveforms() -> Inputs:
    """Return a quarter of a second of sound."""
    return {"input_values": torch.randn(BATCH, 4000)}


def mono_waveforms() -> Inputs:
    """Return sound of one channel."""
    return {"input_values": torch.randn(BATCH, 1, 4800)}


def spectrograms() -> Inputs:
    """Return what Whisper listens to, and its transcript."""
    return {"input_features": torch.randn(BATCH, 80, 200), "labels": transcript()}


def spoken() -> Inputs:
    """Return filter banks by time, and their transcript."""
    return {"input_features": torch.randn(BATCH, 200, 80), "labels": transcript()}


def audio_patches() -> Inputs:
    """Return a spectrogram to classify."""
    return {"input_values": torch.randn(BATCH, 128, 64), "labels": torch.tensor([0, 1])}


def captioned_images() -> Inputs:
    """Return pairs of text and image."""
    return {**images(), "input_ids": tokens()[:, :24], "return_loss": True}  # type: ignore[dict-item]


_USUAL_INPUTS = {
    "encoder": "masked",
    "encoder-decoder": "translated",
    "vision": "classified_images",
    "vision and text": "captioned_images",
    "audio": "waveforms",
}


def _architectures() -> dict[str, Architecture]:
    path = Path(__file__).with_name("architectures.json")
    families = json.loads(path.read_text(encoding="utf-8"))
    shared = families.pop("shared settings")
    return {
        name: Architecture(
            one["model"],
            shared.get(one.get("like"), {}) | one.get("settings", {}),
            one.get("inputs", _USUAL_INPUTS.get(family, "causal")),
        )
        for family, models in families.items()
        for name, one in models.items()
    }


ARCHITECTURES = _architectures()
