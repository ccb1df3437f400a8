"""transformers' pipelines, diffusers, whisper and open_clip, from tiny configurations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.programs_of_others.drivers.tiny import configuration, settings, tokenizer
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
    of_texts: dict[str, tuple[str, str, Any]] = {
        "text-generation": ("GPT2LMHeadModel", "gpt2", ["the cat", "a dog sees"]),
        "fill-mask": ("BertForMaskedLM", "bert", "the <mask> sees the dog"),
        "text-classification": ("BertForSequenceClassification", "bert", ["the cat", "a dog sees"]),
        "token-classification": ("BertForTokenClassification", "bert", "the cat sees"),
        "feature-extraction": ("BertModel", "bert", "the cat"),
    }

    def build() -> tuple[Any, dict[str, Any], Any]:
        if task in of_texts:
            model, kind, given = of_texts[task]
            built = getattr(transformers, model)(configuration(kind))
            return built, {"tokenizer": made}, given
        if task == "image-classification":
            config = transformers.ViTConfig(**settings("vit"))
            image = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
            built = transformers.ViTForImageClassification(config)
            return built, {"image_processor": image}, picture
        if task == "object-detection":
            vision = {**settings("vit"), "image_size": [32, 32]}
            config = transformers.YolosConfig(**vision, num_detection_tokens=5)
            edges = {"shortest_edge": 32, "longest_edge": 32}
            parts = {"image_processor": transformers.YolosImageProcessor(size=edges)}
            return transformers.YolosForObjectDetection(config), parts, picture
        if task == "automatic-speech-recognition":
            built = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**settings("speech")))
            extractor = transformers.Wav2Vec2FeatureExtractor()
            sound = numpy.sin(numpy.arange(4000) / 9.0).astype("float32")
            return built, {"tokenizer": made, "feature_extractor": extractor}, sound
        raise LookupError(task)

    def program() -> None:
        torch.manual_seed(0)
        model, parts, given = build()
        more = {"max_new_tokens": 5, "do_sample": True} if task == "text-generation" else {}
        pipe = transformers.pipeline(
            task, model=model, device=0 if torch.cuda.is_available() else -1, **parts
        )
        print(str(pipe(given, **more))[:300])

    return program


def diffusion(kind: str) -> Callable[[], None]:
    """Train a tiny diffusion model for a step, then sample from its pipeline."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    def program() -> None:
        if kind in ("ddpm", "ddim"):
            model = diffusers.UNet2DModel(**settings("unet")).to(device())
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
            CLIPTextConfig(
                **{**settings("small"), "max_position_embeddings": 16, "projection_dim": 32}
            )
        )
        model = diffusers.UNet2DConditionModel(**settings("stable-diffusion-unet"))
        vae = diffusers.AutoencoderKL(**settings("autoencoder"))
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

    config = transformers.WhisperConfig(**settings("whisper"))

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
