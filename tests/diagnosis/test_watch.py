"""What a second, watched trace sees: why attention fell, and what refers to tensors."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.profile.lifetimes import Lifetimes, Role
from pytest_torchmem.tracing.holders import Names
from pytest_torchmem.tracing.watch import watching
from tests.diagnosis.planted import BATCH, LENGTH, WIDTH, Block, Decoder, ids

PLANTED = Path(__file__).with_name("planted.py")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_constraint_that_attention_does_not_keep(device: str) -> None:
    with watching(device, attention=True) as watch:
        trace(Decoder(depth=1, wrong={"strided": True}).bfloat16(), ids(), device=device)
    [(line, reason)] = watch.attention.items()
    marked = PLANTED.read_text(encoding="utf-8").splitlines()
    assert marked[int(line.rpartition(":")[2]) - 1].endswith("# here: strided_values")
    assert reason == f"value is not contiguous in its last dimension, of stride {LENGTH}"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_keeps_a_tensor(device: str) -> None:
    kept: dict[str, Tensor] = {}

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(kept=True)

        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.block(x)

    def program() -> None:
        model = Keeping().to(device)
        model(torch.zeros(BATCH, LENGTH, WIDTH, device=device)).sum().backward()
        kept["model"] = model

    timeline = trace(program, device=device).timeline
    lifetimes = Lifetimes.of(timeline)
    held = {
        index: allocation.nbytes
        for index, allocation in enumerate(timeline.allocations)
        if lifetimes.role(index, allocation) is Role.HELD
    }
    with watching(device, held) as watch:
        trace(program, device=device)
    assert {"Keeping.last", "the list Block.kept"} <= set(watch.holders.values())


def test_a_module_that_a_variable_holds_is_told_by_its_path() -> None:
    average = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named = Names().of(average[1].weight)
    assert named.startswith("average.1.weight of test_a_module_that")


def test_what_a_librarys_object_holds_is_told_with_what_holds_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "some_cache.py").write_text("class Layer: pass\nclass Cache: pass\n")
    monkeypatch.syspath_prepend(installed)
    library = importlib.import_module("some_cache")
    cache, layer, caches = library.Cache(), library.Layer(), []
    cache.layers, layer.keys = [layer], torch.zeros(1)
    caches.append(cache)
    tensor = layer.keys
    del cache, layer
    caches_of = Names(ignore=None)
    caches_of._variables.pop(id(tensor))  # the variable of this test
    named = caches_of.of(tensor)
    assert named.startswith("Layer.keys in the list caches of test_what_a_librarys")
