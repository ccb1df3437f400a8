"""torchvision's own kernels, against the real allocator."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_torchmem import measure, trace

try:
    ops = pytest.importorskip("torchvision.ops")
except RuntimeError:  # a build for another torch, whose library does not load
    pytest.skip("torchvision has no kernels here", allow_module_level=True)
UNKNOWN = "the workspace of torchvision"
checked = pytest.mark.skipif(
    not version("torchvision").startswith("0.28."), reason="its kernels were compared in 0.28"
)


def boxes(count: int, dtype: torch.dtype, device: str) -> Tensor:
    corners = torch.rand(count, 2, dtype=dtype, device=device) * 20
    return torch.cat([corners, corners + 5], 1)


def suppressed(device: str = "cpu", count: int = 200, dtype: torch.dtype = torch.float32) -> None:
    scores = torch.rand(count, dtype=dtype, device=device)
    kept = ops.nms(boxes(count, dtype, device), scores, 0.5)
    torch.zeros(4 * count, device=device)[kept]


def pooled(device: str = "cpu", *, name: str, strided: bool = False) -> None:
    size = 2 if name.startswith("ps_") else 4
    features = torch.rand(1, 16, 32, 64 if strided else 32, device=device)
    features = features[..., ::2] if strided else features
    features.requires_grad_()
    regions = torch.cat([torch.zeros(7, 1, device=device), boxes(7, torch.float32, device)], 1)
    getattr(ops, name)(features, regions, (size, size)).sum().backward()


def deformed(device: str = "cpu", *, images: int = 2, groups: int = 1, masked: bool = True) -> None:
    make = partial(torch.rand, device=device, requires_grad=True)
    weight, offset = make(8, 8 // groups, 3, 3), make(images, 18, 12, 12)
    mask = make(images, 9, 12, 12) if masked else None
    bias = make(8)
    ops.deform_conv2d(
        make(images, 8, 12, 12), offset, weight, bias, padding=1, mask=mask
    ).sum().backward()


REGIONS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
PROGRAMS: dict[str, Callable[..., None]] = {
    "nms": suppressed,
    "nms in float64": partial(suppressed, dtype=torch.float64),
    "nms of nothing": partial(suppressed, count=0),
    **{
        f"{name} {kind}": partial(pooled, name=name, strided=kind == "strided")
        for name, kind in product(REGIONS, ("dense", "strided"))
    },
    **{
        f"deform_conv2d {options}": partial(deformed, **options)
        for options in ({}, {"groups": 2, "masked": False}, {"images": 35}, {"images": 1})
    },
}


@checked
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_the_cpu_they_take_what_the_allocator_gives(name: str) -> None:
    profile: Any = trace(PROGRAMS[name], host="here")
    assert not profile.warnings
    assert profile.figures() == measure(PROGRAMS[name]).figures()


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_fake_cuda_their_workspaces_are_known(name: str) -> None:
    profile = trace(partial(PROGRAMS[name], "cuda"), device="cuda", gpu="h100")
    assert not any(one.startswith(UNKNOWN) for one in profile.warnings)


def test_the_matrix_of_overlaps_counts_on_fake_cuda() -> None:
    few, many = (
        trace(partial(suppressed, "cuda", count), device="cuda", gpu="h100").peak
        for count in (1000, 4000)
    )
    assert many - few > 4000 * -(-4000 // 64) * 8 - 1000 * -(-1000 // 64) * 8
