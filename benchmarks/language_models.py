"""The language models that several benchmarks share, with random weights and token ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model of ``transformers`` and the shape of the token ids it is called with."""

    name: str
    make: Callable[[], torch.nn.Module]
    batch: int
    length: int
    labels: bool

    def build(self, device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """Return the model on a device; on ``meta`` that takes no memory, whatever its size."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return self.make()
        finally:
            torch.set_default_dtype(default)

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """Return token ids, and labels for a model that computes its own loss."""
        shape = (self.batch, self.length)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        if device == "cpu":
            ids = torch.randint(10, 1000, shape)
        return {"input_ids": ids, "labels": ids} if self.labels else {"input_ids": ids}


def _transformers(model: str, config: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made: torch.nn.Module = getattr(transformers, model)(
            getattr(transformers, config)(**settings)
        )
        return made

    return make


GPT2 = LanguageModel(
    "GPT-2, 6 layers",
    _transformers(
        "GPT2LMHeadModel", "GPT2Config", n_layer=6, n_embd=512, n_head=8, loss_type="ForCausalLM"
    ),
    batch=2,
    length=128,
    labels=True,
)
BERT = LanguageModel(
    "BERT, 4 layers",
    _transformers(
        "BertModel",
        "BertConfig",
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
    ),
    batch=8,
    length=128,
    labels=False,
)


LLAMA_1B = LanguageModel(
    "Llama 3.2 1B",
    _transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    ),
    batch=1,
    length=2048,
    labels=True,
)
