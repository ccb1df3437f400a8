"""diffusers' networks, narrow ones, and a diffusion of its own."""

from typing import Any

import torch

from benchmarks.libraries.registry import Step, register

_CONDITIONED: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 48,
    "attention_head_dim": 8,
}
_CODER: dict[str, Any] = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
}


def _steps() -> torch.Tensor:
    return torch.tensor([3, 7])


def _sample(output: Any) -> torch.Tensor:
    result: torch.Tensor = output.sample.sum()
    return result


@register("diffusers/UNet2DModel")
def _unet() -> Step:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
    )
    return Step(model, (torch.randn(2, 3, 32, 32), _steps()), loss_fn=_sample)


@register("diffusers/UNet2DConditionModel")
def _conditioned() -> Step:
    import diffusers

    up = ("UpBlock2D", "CrossAttnUpBlock2D")
    model = diffusers.UNet2DConditionModel(sample_size=16, up_block_types=up, **_CONDITIONED)
    inputs = torch.randn(2, 4, 16, 16), _steps(), torch.randn(2, 7, 48)
    return Step(model, inputs, loss_fn=_sample)


@register("diffusers/UNet2DConditionModel, checkpointed")
def _checkpointed() -> Step:
    step = _conditioned()
    step.model.enable_gradient_checkpointing()  # type: ignore[operator]
    return step


@register("diffusers/ControlNetModel")
def _control() -> Step:
    import diffusers

    model = diffusers.ControlNetModel(conditioning_embedding_out_channels=(16, 32), **_CONDITIONED)
    images = torch.randn(2, 4, 16, 16), torch.randn(2, 3, 32, 32)
    inputs = images[0], _steps(), torch.randn(2, 7, 48), images[1]
    return Step(model, inputs, loss_fn=lambda output: output.mid_block_res_sample.sum())


@register("diffusers/AutoencoderKL")
def _autoencoder() -> Step:
    import diffusers

    model = diffusers.AutoencoderKL(**_CODER)
    return Step(model, (torch.randn(2, 3, 32, 32),), {"sample_posterior": True}, loss_fn=_sample)


@register("diffusers/VQModel")
def _quantised() -> Step:
    import diffusers

    model = diffusers.VQModel(num_vq_embeddings=64, **_CODER)
    return Step(model, (torch.randn(2, 3, 32, 32),), loss_fn=_sample)


@register("diffusers/DiTTransformer2DModel")
def _dit() -> Step:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16
    )
    named = {"timestep": _steps(), "class_labels": torch.tensor([1, 2])}
    return Step(model, (torch.randn(2, 4, 16, 16),), named, loss_fn=_sample)


@register("diffusers/SD3Transformer2DModel")
def _sd3() -> Step:
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        pos_embed_max_size=16,
        in_channels=4,
        out_channels=4,
    )
    inputs = torch.randn(2, 4, 16, 16), torch.randn(2, 7, 48), torch.randn(2, 64), _steps()
    return Step(model, inputs, loss_fn=_sample)


@register("diffusers/FluxTransformer2DModel")
def _flux() -> Step:
    import diffusers

    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    named = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return Step(model, (), named, loss_fn=_sample)


@register("denoising-diffusion-pytorch/GaussianDiffusion")
def _gaussian() -> Step:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2)), image_size=32, timesteps=10)
    return Step(model, (torch.rand(2, 3, 32, 32),), loss_fn=lambda output: output)
