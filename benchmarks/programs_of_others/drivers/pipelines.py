"""transformers' pipelines, diffusers, whisper and open_clip, from tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.programs_of_others.drivers.tiny import SMALL, configuration, tokenizer
from benchmarks.programs_of_others.drivers.vision import device


def pipelines(task: str) -> Callable[[], None]:
    """Build a pipeline with tiny models and call it."""
    import numpy
    import transformers
    from PIL import Image

    made = tokenizer()
    picture = Image.fromarray(
        numpy.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=numpy.uint8)
    )
    vision: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }

    def build() -> tuple[Any, dict[str, Any], Any]:
        if task == "text-generation":
            model = transformers.GPT2LMHeadModel(configuration("gpt2"))
            return model, {"tokenizer": made}, (["the cat", "a dog sees"],)
        if task == "fill-mask":
            model = transformers.BertForMaskedLM(configuration("bert"))
            return model, {"tokenizer": made}, ("the <mask> sees the dog",)
        if task == "text-classification":
            model = transformers.BertForSequenceClassification(configuration("bert"))
            return model, {"tokenizer": made}, (["the cat", "a dog sees"],)
        if task == "token-classification":
            model = transformers.BertForTokenClassification(configuration("bert"))
            return model, {"tokenizer": made}, ("the cat sees",)
        if task == "feature-extraction":
            return transformers.BertModel(configuration("bert")), {"tokenizer": made}, ("the cat",)
        if task == "image-classification":
            model = transformers.ViTForImageClassification(transformers.ViTConfig(**vision))
            return (
                model,
                {
                    "image_processor": transformers.ViTImageProcessor(
                        size={"height": 32, "width": 32}
                    )
                },
                (picture,),
            )
        if task == "object-detection":
            config = transformers.YolosConfig(
                **{**vision, "image_size": [32, 32]}, num_detection_tokens=5
            )
            processor = transformers.YolosImageProcessor(
                size={"shortest_edge": 32, "longest_edge": 32}
            )
            return (
                transformers.YolosForObjectDetection(config),
                {"image_processor": processor},
                (picture,),
            )
        if task == "automatic-speech-recognition":
            config = transformers.Wav2Vec2Config(
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
            )
            model = transformers.Wav2Vec2ForCTC(config)
            extractor = transformers.Wav2Vec2FeatureExtractor()
            return (
                model,
                {"tokenizer": made, "feature_extractor": extractor},
                (numpy.sin(numpy.arange(4000) / 9.0).astype("float32"),),
            )
        raise LookupError(task)

    def program() -> None:
        torch.manual_seed(0)
        model, parts, arguments = build()
        more = {"max_new_tokens": 5, "do_sample": True} if task == "text-generation" else {}
        pipe = transformers.pipeline(
            task, model=model, device=0 if torch.cuda.is_available() else -1, **parts
        )
        print(str(pipe(*arguments, **more))[:300])

    return program


def diffusion(kind: str) -> Callable[[], None]:
    """Train a tiny diffusion model for a step, then sample from its pipeline."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    def unet(**more: Any) -> Any:
        return diffusers.UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **more,
        )

    def program() -> None:
        if kind in ("ddpm", "ddim"):
            model = unet().to(device())
            scheduler = (
                diffusers.DDPMScheduler(100) if kind == "ddpm" else diffusers.DDIMScheduler(100)
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            clean = torch.rand(2, 3, 16, 16, device=device())
            noise = torch.randn(clean.shape, device=device())
            steps = torch.randint(0, 100, (2,), device=device()).long()
            predicted = model(scheduler.add_noise(clean, noise, steps), steps, return_dict=False)[0]
            nn.functional.mse_loss(predicted, noise).backward()
            optimizer.step()
            make = diffusers.DDPMPipeline if kind == "ddpm" else diffusers.DDIMPipeline
            pipe = make(model, scheduler).to(device())
            pipe.set_progress_bar_config(disable=True)
            print(pipe(batch_size=1, num_inference_steps=3).images[0].size)
            return
        words = CLIPTextModel(
            CLIPTextConfig(**{**SMALL, "max_position_embeddings": 16, "projection_dim": 32})
        )
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=32,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        )
        made = tokenizer()
        made.model_max_length = 16
        scheduler = (
            diffusers.EulerDiscreteScheduler()
            if kind == "euler"
            else diffusers.DPMSolverMultistepScheduler()
        )
        pipe = diffusers.StableDiffusionPipeline(
            vae=vae,
            text_encoder=words,
            tokenizer=made,
            unet=model,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).to(device())
        pipe.set_progress_bar_config(disable=True)
        print(pipe("the cat", num_inference_steps=3, height=16, width=16).images[0].size)

    return program


def whisper_transcription(what: str) -> Callable[[], None]:
    """Transcribe a second of sound with an untrained tiny whisper."""
    import whisper
    from whisper.model import ModelDimensions, Whisper

    dimensions = ModelDimensions(80, 1500, 32, 4, 1, 51865, 448, 32, 4, 1)

    def program() -> None:
        model = Whisper(dimensions)
        # Of an untrained model this is memory that nobody has written to.
        torch.nn.init.normal_(model.decoder.positional_embedding)
        model = model.to(device())
        audio = torch.sin(torch.arange(16000) / 20.0)
        if what == "decode":
            sound = whisper.pad_or_trim(audio)
            mel = whisper.log_mel_spectrogram(sound).to(model.device)
            _, probabilities = model.detect_language(mel)
            print(f"Detected language: {max(probabilities, key=probabilities.get)}")
            options = whisper.DecodingOptions(fp16=torch.cuda.is_available(), sample_len=5)
            print(whisper.decode(model, mel, options).text)
        else:
            result = model.transcribe(
                audio.numpy(), fp16=False, sample_len=5, beam_size=2, language="en"
            )
            print(result["text"])

    return program


def transformers_whisper() -> Callable[[], None]:
    """Train transformers' whisper for a step, then transcribe with its generate."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )

    def program() -> None:
        model = transformers.WhisperForConditionalGeneration(config).to(device())
        features = torch.randn(2, 8, 100, device=device())
        model(
            input_features=features, labels=torch.randint(3, 60, (2, 6), device=device())
        ).loss.backward()
        print(model.eval().generate(features, max_new_tokens=5).tolist())

    return program


def open_clip_training() -> Callable[[], None]:
    """Train a tiny CLIP of open_clip with its loss."""
    import open_clip
    from open_clip.model import CLIP

    def program() -> None:
        model = CLIP(
            32,
            {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16},
            {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
        ).to(device())
        images = torch.randn(4, 3, 32, 32, device=device())
        words = torch.randint(1, 64, (4, 16), device=device())
        loss = open_clip.ClipLoss()(*model(images, words))
        loss.backward()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        print(loss.item())

    return program
