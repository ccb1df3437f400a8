"""Small models of the architectures in ``transformers``, built from configs with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

VOCABULARY = 1000
BATCH, LENGTH = 2, 48
IMAGE = 64

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of ``transformers``, a config to shrink it, and what it is called with."""

    model: str
    config: str
    inputs: Callable[[], Inputs]
    family: str
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[torch.nn.Module, Inputs]:
        """Return the model in training mode and its keyword arguments."""
        import transformers

        config = getattr(transformers, self.config)(**self.settings)
        model: torch.nn.Module = getattr(transformers, self.model)(config)
        return model.train(), self.inputs()


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


def _shared(**settings: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "pad_token_id": 0, **settings}


_GPT = _shared(n_embd=64, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
_LLAMA = _shared(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
)
_HEADS = _LLAMA | {"head_dim": 16}
_BERT = _shared(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=128,
)
_BART = _shared(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
_T5 = _shared(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": IMAGE,
    "patch_size": 8,
}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
_WAV = _shared(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    conv_dim=(32, 32, 32),
    conv_stride=(5, 2, 2),
    conv_kernel=(10, 3, 2),
    num_feat_extract_layers=3,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    mask_time_prob=0.0,
    layerdrop=0.0,
)
_CLIP = {
    "text_config": {**_BERT, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": _VIT,
    "projection_dim": 32,
}


def _decoder(model: str, config: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(model, config, causal, "decoder", settings | more)


def _encoder(model: str, config: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(model, config, masked, "encoder", settings | more)


def _pair(model: str, config: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(model, config, translated, "encoder-decoder", settings | more)


def _vision(
    model: str,
    config: str,
    settings: dict[str, Any],
    inputs: Callable[[], Inputs] = classified_images,
    **more: Any,
) -> Architecture:
    return Architecture(model, config, inputs, "vision", settings | more)


def _audio(
    model: str,
    config: str,
    settings: dict[str, Any],
    inputs: Callable[[], Inputs] = waveforms,
    **more: Any,
) -> Architecture:
    return Architecture(model, config, inputs, "audio", settings | more)


def _experts(model: str, config: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(model, config, causal, "mixture of experts", settings | more)


def _recurrence(model: str, config: str, settings: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(model, config, causal, "state space", settings | more)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": _decoder("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gpt-neo": _decoder(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _shared(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=16,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "gpt-j": _decoder("GPTJForCausalLM", "GPTJConfig", _GPT, rotary_dim=8),
    "gpt-neox": _decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", _LLAMA),
    "gpt-bigcode": _decoder("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT),
    "codegen": _decoder("CodeGenForCausalLM", "CodeGenConfig", _GPT, rotary_dim=8),
    "opt": _decoder(
        "OPTForCausalLM",
        "OPTConfig",
        _BERT,
        ffn_dim=128,
        word_embed_proj_dim=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bloom": _decoder(
        "BloomForCausalLM",
        "BloomConfig",
        _shared(hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    ),
    "falcon": _decoder("FalconForCausalLM", "FalconConfig", _LLAMA, new_decoder_architecture=True),
    "mpt": _decoder(
        "MptForCausalLM",
        "MptConfig",
        _shared(d_model=64, n_layers=2, n_heads=4, max_seq_len=128),
    ),
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "mistral": _decoder("MistralForCausalLM", "MistralConfig", _LLAMA, sliding_window=16),
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "gemma": _decoder("GemmaForCausalLM", "GemmaConfig", _HEADS),
    "gemma2": _decoder("Gemma2ForCausalLM", "Gemma2Config", _HEADS, sliding_window=16),
    "gemma3": _decoder("Gemma3ForCausalLM", "Gemma3TextConfig", _HEADS, sliding_window=16),
    "phi": _decoder("PhiForCausalLM", "PhiConfig", _LLAMA),
    "phi3": _decoder("Phi3ForCausalLM", "Phi3Config", _LLAMA),
    "stablelm": _decoder("StableLmForCausalLM", "StableLmConfig", _LLAMA),
    "olmo2": _decoder("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "cohere": _decoder("CohereForCausalLM", "CohereConfig", _LLAMA),
    "starcoder2": _decoder("Starcoder2ForCausalLM", "Starcoder2Config", _LLAMA),
    "granite": _decoder("GraniteForCausalLM", "GraniteConfig", _LLAMA),
    "glm4": _decoder("Glm4ForCausalLM", "Glm4Config", _HEADS),
    "smollm3": _decoder("SmolLM3ForCausalLM", "SmolLM3Config", _LLAMA),
    "bert": _encoder("BertForMaskedLM", "BertConfig", _BERT),
    "roberta": _encoder("RobertaForMaskedLM", "RobertaConfig", _BERT),
    "distilbert": _encoder(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _shared(dim=64, n_layers=2, n_heads=4, hidden_dim=128, max_position_embeddings=128),
    ),
    "albert": _encoder("AlbertForMaskedLM", "AlbertConfig", _BERT, embedding_size=32),
    "electra": _encoder("ElectraForMaskedLM", "ElectraConfig", _BERT, embedding_size=32),
    "deberta-v2": _encoder(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        _BERT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=32,
    ),
    "mpnet": _encoder("MPNetForMaskedLM", "MPNetConfig", _BERT),
    "modernbert": _encoder(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _BERT,
        global_attn_every_n_layers=2,
        local_attention=16,
        cls_token_id=1,
        sep_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "convbert": _encoder("ConvBertForMaskedLM", "ConvBertConfig", _BERT, embedding_size=64),
    "squeezebert": _encoder(
        "SqueezeBertForMaskedLM", "SqueezeBertConfig", _BERT, embedding_size=64
    ),
    "nystromformer": _encoder(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        _BERT,
        segment_means_seq_len=48,
        num_landmarks=48,
    ),
    "fnet": Architecture("FNetForMaskedLM", "FNetConfig", causal, "encoder", _BERT),
    "funnel": _encoder(
        "FunnelForMaskedLM",
        "FunnelConfig",
        _shared(block_sizes=[1, 1], d_model=64, n_head=4, d_head=16, d_inner=128),
    ),
    "xlnet": Architecture(
        "XLNetModel",
        "XLNetConfig",
        unlabelled,
        "encoder",
        _shared(d_model=64, n_layer=2, n_head=4, d_inner=128),
    ),
    "t5": _pair("T5ForConditionalGeneration", "T5Config", _T5),
    "mt5": _pair("MT5ForConditionalGeneration", "MT5Config", _T5),
    "bart": _pair("BartForConditionalGeneration", "BartConfig", _BART),
    "mbart": _pair("MBartForConditionalGeneration", "MBartConfig", _BART),
    "pegasus": _pair("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "marian": _pair("MarianMTModel", "MarianConfig", _BART, decoder_vocab_size=VOCABULARY),
    "m2m-100": _pair("M2M100ForConditionalGeneration", "M2M100Config", _BART),
    "blenderbot": _pair("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART),
    "prophetnet": _pair(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        _shared(
            hidden_size=64,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=128,
            decoder_start_token_id=1,
        ),
    ),
    "vit": _vision("ViTForImageClassification", "ViTConfig", _VIT),
    "deit": _vision("DeiTForImageClassification", "DeiTConfig", _VIT),
    "beit": _vision("BeitForImageClassification", "BeitConfig", _VIT),
    "dinov2": _vision("Dinov2ForImageClassification", "Dinov2Config", _VIT),
    "vit-mae": _vision(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        _VIT,
        images,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "swin": _vision(
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        image_size=IMAGE,
        patch_size=4,
    ),
    "swinv2": _vision(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        image_size=IMAGE,
        patch_size=4,
    ),
    "convnext": _vision("ConvNextForImageClassification", "ConvNextConfig", _STAGES),
    "convnextv2": _vision("ConvNextV2ForImageClassification", "ConvNextV2Config", _STAGES),
    "resnet": _vision("ResNetForImageClassification", "ResNetConfig", _STAGES, embedding_size=16),
    "regnet": _vision(
        "RegNetForImageClassification", "RegNetConfig", _STAGES, embedding_size=16, groups_width=8
    ),
    "mobilenet-v2": _vision(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"depth_multiplier": 0.35, "image_size": IMAGE},
    ),
    "mobilevit": _vision(
        "MobileViTForImageClassification",
        "MobileViTConfig",
        {
            "hidden_sizes": [32, 48, 64],
            "neck_hidden_sizes": [8, 16, 24, 32, 48, 64, 96],
            "image_size": IMAGE,
        },
    ),
    "segformer": _vision(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 32,
        },
        segmented_images,
    ),
    "poolformer": _vision("PoolFormerForImageClassification", "PoolFormerConfig", _STAGES),
    "dpt": _vision(
        "DPTForSemanticSegmentation",
        "DPTConfig",
        _VIT,
        segmented_images,
        num_hidden_layers=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=32,
    ),
    "clip": Architecture("CLIPModel", "CLIPConfig", captioned_images, "vision and text", _CLIP),
    "siglip": Architecture(
        "SiglipModel", "SiglipConfig", captioned_images, "vision and text", _CLIP
    ),
    "wav2vec2": _audio("Wav2Vec2Model", "Wav2Vec2Config", _WAV),
    "hubert": _audio("HubertModel", "HubertConfig", _WAV),
    "wavlm": _audio("WavLMModel", "WavLMConfig", _WAV),
    "data2vec-audio": _audio("Data2VecAudioModel", "Data2VecAudioConfig", _WAV),
    "whisper": _audio(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _BART,
        spectrograms,
        max_source_positions=100,
        max_target_positions=64,
        num_mel_bins=80,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "speech-to-text": _audio(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        _BART,
        spoken,
        input_feat_per_channel=80,
        conv_channels=64,
        max_source_positions=200,
        max_target_positions=64,
    ),
    "audio-spectrogram": _audio(
        "ASTForAudioClassification",
        "ASTConfig",
        {key: value for key, value in _VIT.items() if key != "image_size"},
        audio_patches,
        max_length=128,
        num_mel_bins=64,
    ),
    "encodec": _audio(
        "EncodecModel",
        "EncodecConfig",
        {"num_filters": 8, "hidden_size": 32, "codebook_size": 64, "codebook_dim": 32},
        lambda: {"input_values": torch.randn(BATCH, 1, 4800)},
    ),
    "mixtral": _experts("MixtralForCausalLM", "MixtralConfig", _LLAMA, num_local_experts=4),
    "qwen2-moe": _experts(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _LLAMA,
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "qwen3-moe": _experts(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _HEADS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "olmoe": _experts(
        "OlmoeForCausalLM", "OlmoeConfig", _LLAMA, num_experts=4, num_experts_per_tok=2
    ),
    "gpt-oss": _experts(
        "GptOssForCausalLM", "GptOssConfig", _HEADS, num_local_experts=4, sliding_window=16
    ),
    "deepseek-v3": _experts(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        _LLAMA,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "switch-transformers": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        translated,
        "mixture of experts",
        _T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "mamba": _recurrence(
        "MambaForCausalLM",
        "MambaConfig",
        _shared(hidden_size=64, num_hidden_layers=2, state_size=8),
    ),
    "mamba2": _recurrence(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _shared(
            hidden_size=64,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=16,
            n_groups=2,
            chunk_size=16,
        ),
    ),
    "falcon-mamba": _recurrence(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        _shared(hidden_size=64, num_hidden_layers=2, state_size=8),
    ),
    "rwkv": _recurrence(
        "RwkvForCausalLM",
        "RwkvConfig",
        _shared(hidden_size=64, num_hidden_layers=2, attention_hidden_size=64, context_length=64),
    ),
    "jamba": _recurrence(
        "JambaForCausalLM",
        "JambaConfig",
        _LLAMA,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=8,
    ),
    "recurrent-gemma": _recurrence(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        _HEADS,
        num_hidden_layers=3,
        lru_width=64,
        attention_window_size=16,
    ),
}
