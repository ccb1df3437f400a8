"""Image models: timm's, one of each of its modules, and torchvision's."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.libraries.registry import Step, register

#: The smallest model of each of the modules of timm 1.0 with fewer than 60 million parameters, at
#: its own size of images.
TIMM = [
    "cait_xxs24_224",
    "coat_tiny",
    "convit_tiny",
    "convmixer_768_32",
    "cpubone_nano",
    "crossvit_tiny_240",
    "cs3darknet_focus_s",
    "csatv2",
    "cspnext_tiny",
    "davit_tiny",
    "deit_tiny_patch16_224",
    "densenet121",
    "dla46x_c",
    "dpn48b",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientformerv2_s0",
    "efficientvim_m1",
    "efficientvit_b0",
    "efficientvit_m0",
    "ese_vovnet19b_slim_dw",
    "eva02_tiny_patch14_224",
    "fasternet_t0",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "ghostnet_050",
    "gmlp_ti16_224",
    "haloregnetz_b",
    "hardcorenas_b",
    "hgnetv2_b0",
    "hiera_tiny_224",
    "hieradet_small",
    "hrnet_w18_small",
    "iformer_t",
    "inception_next_atto",
    "inception_resnet_v2",
    "inception_v3",
    "inception_v4",
    "lcnetv2_small",
    "legacy_seresnet18",
    "legacy_xception",
    "levit_128s",
    "lowformer_b0",
    "mobilenetv3_small_050",
    "mobilevit_xxs",
    "mvitv2_tiny",
    "nest_tiny",
    "nextvit_small",
    "pit_ti_224",
    "poolformerv2_s12",
    "pvt_v2_b0",
    "rdnet_tiny",
    "regnetx_002",
    "repghostnet_050",
    "repvit_m1",
    "res2next50",
    "resnest14d",
    "resnetv2_18",
    "rexnet_100",
    "selecsls42",
    "sequencer2d_s",
    "shvit_s1",
    "skresnet18",
    "starnet_s050",
    "swiftformer_xs",
    "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224",
    "test_byobnet",
    "test_coatnet",
    "test_convnext",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "test_vit_relpos",
    "tiny_vit_5m_224",
    "tinynet_e",
    "tnt_s_legacy_patch16_224",
    "tresnet_m",
    "twins_svt_small",
    "visformer_tiny",
    "vit_tiny_r_s16_p8_224",
    "vitamin_small_224",
    "volo_d1_224",
    "xception41p",
    "xcit_nano_12_p8_224",
]

#: By name, the width of the images.
CLASSIFIERS = {
    "alexnet": 224,
    "convnext_tiny": 96,
    "densenet121": 64,
    "efficientnet_b0": 96,
    "efficientnet_v2_s": 64,
    "googlenet": 96,
    "inception_v3": 299,
    "maxvit_t": 224,
    "mnasnet0_5": 96,
    "mobilenet_v2": 96,
    "mobilenet_v3_small": 96,
    "regnet_x_400mf": 96,
    "regnet_y_400mf": 96,
    "resnet18": 96,
    "resnext50_32x4d": 96,
    "shufflenet_v2_x0_5": 96,
    "squeezenet1_0": 96,
    "swin_t": 96,
    "swin_v2_t": 64,
    "vgg11_bn": 64,
    "vit_b_32": 224,
    "wide_resnet50_2": 64,
}
SEGMENTATION = (
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)
#: By name, the frames of a film and their width.
FILMS = {
    "mc3_18": (8, 64),
    "r2plus1d_18": (8, 64),
    "r3d_18": (8, 64),
    "s3d": (16, 224),
    "swin3d_t": (8, 64),
}


def _of_timm(name: str) -> Step:
    import timm

    model = timm.create_model(name)
    return Step(model, (torch.randn(2, *model.default_cfg.get("input_size", (3, 224, 224))),))


def _of_torchvision(name: str, *shape: int, **options: Any) -> Step:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, **options)
    return Step(model, (torch.randn(*shape),), loss_fn=_first_summed)


def _first_summed(output: Any) -> torch.Tensor:
    """Return the sum of the output, of the first of several, or of the one that is named so."""
    if isinstance(output, dict):
        output = output["out"]
    result: torch.Tensor = (output if isinstance(output, torch.Tensor) else output[0]).sum()
    return result


for _name in TIMM:
    register(f"timm/{_name}")(lambda name=_name: _of_timm(name))
for _name, _width in CLASSIFIERS.items():
    register(f"torchvision/{_name}")(
        lambda name=_name, width=_width: _of_torchvision(name, 2, 3, width, width)
    )
for _name in SEGMENTATION:
    register(f"torchvision/{_name}")(
        lambda name=_name: _of_torchvision(name, 2, 3, 128, 128, weights_backbone=None)
    )
for _name, (_frames, _width) in FILMS.items():
    register(f"torchvision/{_name}")(
        lambda name=_name, frames=_frames, width=_width: _of_torchvision(
            name, 1, 3, frames, width, width
        )
    )


@register("torchvision/raft_small")
def _raft() -> Step:
    import torchvision

    model = torchvision.models.get_model("raft_small", weights=None)
    images = torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)
    return Step(model, images, {"num_flow_updates": 3}, loss_fn=lambda o: sum(x.sum() for x in o))
