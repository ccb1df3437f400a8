"""Image models: timm's, one of each of its modules, and torchvision's."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.libraries.registry import Step, register

#: Of timm 1.0 the smallest model of each of its modules with fewer than 60 million parameters, at
#: its own size of images.
NAMES: dict[str, Any] = json.loads(
    Path(__file__).with_name("names.json").read_text(encoding="utf-8")
)


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


for _name in NAMES["timm"]:
    register(f"timm/{_name}")(lambda name=_name: _of_timm(name))
for _name, _width in NAMES["torchvision, by the width of images"].items():
    register(f"torchvision/{_name}")(
        lambda name=_name, width=_width: _of_torchvision(name, 2, 3, width, width)
    )
for _name in NAMES["torchvision, segmentation"]:
    register(f"torchvision/{_name}")(
        lambda name=_name: _of_torchvision(name, 2, 3, 128, 128, weights_backbone=None)
    )
for _name, (_frames, _width) in NAMES[
    "torchvision, by the frames of films and their width"
].items():
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
