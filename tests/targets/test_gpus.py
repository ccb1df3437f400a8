"""The catalogue of GPUs is consistent, and a GPU found in a machine is the right one of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import DeviceProperties
from pytest_torchmem.measurement.device import known_gpu, name_of
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from pytest_torchmem.targets.target import MODELLED

THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
"""Of a multiprocessor (CUDA C++ Programming Guide); 2,048 for all other capabilities."""
MIB = 1024**2


@pytest.mark.parametrize("name", gpu_names())
def test_gpus_are_found_by_name_and_have_figures_that_fit(name: str) -> None:
    gpu = find_gpu(name)
    assert known_gpu(replace(gpu, name=name_of(gpu.product), context=1)) == gpu
    assert known_gpu(replace(gpu, memory=gpu.memory - 100 * MIB)) == gpu
    gpu = find_gpu(name)
    assert gpu.threads_per_multiprocessor == THREADS.get(gpu.capability, 2048)
    properties = DeviceProperties(gpu)
    assert properties.total_memory == gpu.memory
    assert properties.shared_memory_per_block_optin <= properties.shared_memory_per_multiprocessor


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("A100", "a100-80gb"),
        ("RTX 2080 Ti", "rtx-2080-ti"),
        ("H100 NVL", "h100-nvl"),
        ("a6000", "rtx-a6000"),
        ("6000 Ada", "rtx-6000-ada"),
        ("V100 32GB", "v100-32gb"),
        ("A100-80GB:3g.40gb", "a100-80gb:3g.40gb"),
    ],
)
def test_names_that_people_write(name: str, means: str) -> None:
    assert find_gpu(name).name == means


def test_a_gpu_that_nobody_published_figures_of_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="'b100' is not a known GPU"):
        find_gpu("b100")


@pytest.mark.parametrize("name", ["mi300x", "mi250", "gaudi3", "m3-max", "arc-a770"])
def test_a_gpu_of_another_maker_is_not_taken_for_one_of_nvidia(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is not a known GPU of NVIDIA. Known: "):
        find_gpu(name)


@pytest.mark.parametrize("other", ["mps", "xpu"])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="a build for such a device runs it")
def test_a_program_for_another_maker_hears_what_is_modelled(device: str, other: str) -> None:
    for step in (lambda: torch.zeros(4, device=other), lambda: torch.nn.Linear(3, 3).to(other)):
        with pytest.raises((RuntimeError, AssertionError)) as caught:
            trace(step, device=device)
        notes = getattr(caught.value, "__notes__", [])
        assert MODELLED in "\n".join([str(caught.value), *notes])


def test_the_documentation_lists_the_catalogue() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    row = r"^\| `([a-z0-9.:-]+)` \| (\S+) \| (\S+) GiB \| (\d+) MiB \| (\d+) \|"
    rows = re.findall(row, page, re.M)
    assert rows == [
        (
            gpu.name,
            ".".join(map(str, gpu.capability)),
            f"{gpu.memory / 1024**3:.2f}",
            str(gpu.context // MIB),
            str(gpu.multiprocessors),
        )
        for gpu in map(find_gpu, gpu_names())
    ]
