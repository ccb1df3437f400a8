"""Models of published width on inputs of published size, in four ways of training them.

Which kernel a CPU runs, and what it takes besides, depends on sizes: what holds for a tiny model
need not hold for a real one. Stacks are cut to a few layers, which repeat.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.isolation.sample import Named, Sample, named

Inputs = dict[str, Tensor]


def _images(batch: int, size: int = 224) -> Inputs:
    return {"pixel_values": torch.rand(batch, 3, size, size)}


def _classified(batch: int) -> Inputs:
    return {**_images(batch), "labels": torch.zeros(batch, dtype=torch.int64)}


def _segmented(batch: int, size: int) -> Inputs:
    labels = torch.zeros(batch, size, size, dtype=torch.int64)
    return {**_images(batch, size), "labels": labels}


def _text(batch: int, length: int, vocabulary: int = 1000) -> Inputs:
    ids = torch.randint(1, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _speech(batch: int) -> Inputs:
    return {"input_values": torch.rand(batch, 16000), "labels": torch.randint(1, 30, (batch, 10))}


def _spectrogram() -> Inputs:
    return {"input_features": torch.rand(1, 80, 3000), "labels": torch.randint(1, 1000, (1, 20))}


_LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
}
_MAMBA = {"hidden_size": 256, "num_hidden_layers": 2, "vocab_size": 1000}

#: By name: the model's class, what its config is given, and the inputs.
PUBLISHED: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "resnet-50": ("ResNetForImageClassification", {}, lambda: _classified(4)),
    "vit-base": ("ViTForImageClassification", {"num_hidden_layers": 4}, lambda: _classified(4)),
    "convnext-tiny": ("ConvNextForImageClassification", {}, lambda: _classified(2)),
    "mobilenet-v2": ("MobileNetV2ForImageClassification", {}, lambda: _classified(2)),
    "swin-tiny": ("SwinForImageClassification", {}, lambda: _classified(2)),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {"num_labels": 5},
        lambda: _segmented(1, 256),
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 4}, lambda: _text(2, 256)),
    "bert-base": ("BertForMaskedLM", {"num_hidden_layers": 4}, lambda: _text(4, 128)),
    "llama": ("LlamaForCausalLM", _LLAMA, lambda: _text(2, 256)),
    "t5-small": (
        "T5ForConditionalGeneration",
        {"num_layers": 3, "decoder_start_token_id": 0},
        lambda: _text(2, 64),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"encoder_layers": 2, "decoder_layers": 2},
        _spectrogram,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", {"num_hidden_layers": 3, "layerdrop": 0.0}, lambda: _speech(2)),
    "mamba": ("MambaForCausalLM", _MAMBA, lambda: _text(2, 64)),
}

WAYS = ("float32", "channels-last", "bfloat16", "autocast")


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**inputs)


def models(pattern: str = "") -> list[Named]:
    """Return the models whose name has a match of the regular expression ``pattern``."""
    return named(PUBLISHED, pattern)


def samples(model: Named, limit: int = 0) -> Iterator[Sample]:
    """Yield the model's forward and backward in each way of training it."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_name, settings, make_inputs = PUBLISHED[model.case]
    for index, way in enumerate(WAYS):
        torch.manual_seed(0)
        built = getattr(transformers, model_name)
        network: nn.Module = built(built.config_class(**settings)).train()
        inputs = make_inputs()
        if way == "channels-last":
            network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = {name: _channels_last(value) for name, value in inputs.items()}
        elif way == "bfloat16":
            network = network.bfloat16()
            inputs = {
                name: value.bfloat16() if value.is_floating_point() else value
                for name, value in inputs.items()
            }
        elif way == "autocast":
            network = _Autocast(network)
        yield Sample(index, network, kwargs=inputs, detail=way)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
