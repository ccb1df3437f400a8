"""A tokenizer of words and tiny configurations of models of transformers."""

from __future__ import annotations

from typing import Any

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "tree",
    "runs",
    "sees",
    "eats",
    "small",
    "big",
    "red",
    "and",
    "or",
    "with",
    "under",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>"]
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
)


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        sep_token="<sep>",
        cls_token="<cls>",
        model_max_length=64,
    )
    made.chat_template = CHAT
    return made


SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "llama": {**SMALL, "num_key_value_heads": 2},
    "mistral": {**SMALL, "num_key_value_heads": 2, "sliding_window": 8},
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2_moe": {
        **SMALL,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    "phi": SMALL,
    "stablelm": SMALL,
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": SMALL,
    "bloom": {**SMALL, "n_head": 4, "n_layer": 2},
    "mamba": {**SMALL, "state_size": 8},
    "mamba2": {
        **SMALL,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "rwkv": {**SMALL, "attention_hidden_size": 32, "context_length": 64},
    "t5": {
        "vocab_size": 32,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "bart": {
        "vocab_size": 32,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    },
    "bert": {**SMALL, "max_position_embeddings": 64},
    "roberta": {**SMALL, "max_position_embeddings": 66},
    "deberta-v2": {
        **SMALL,
        "max_position_embeddings": 64,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "distilbert": {"vocab_size": 32, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": {**SMALL, "embedding_size": 16},
    "longformer": {**SMALL, "attention_window": 8, "max_position_embeddings": 66},
    "big_bird": {**SMALL, "max_position_embeddings": 64, "block_size": 4, "num_random_blocks": 1},
    "xlnet": {"vocab_size": 32, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "funnel": {
        "vocab_size": 32,
        "block_sizes": [1, 1],
        "d_model": 32,
        "n_head": 4,
        "d_head": 8,
        "d_inner": 64,
        "num_decoder_layers": 1,
    },
    "reformer": {
        **SMALL,
        "attention_head_size": 8,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "feed_forward_size": 64,
        "num_buckets": 4,
        "is_decoder": True,
        "num_hashes": 2,
    },
}


def configuration(kind: str) -> Any:
    """Return a tiny configuration of a kind of model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **SETTINGS[kind])
