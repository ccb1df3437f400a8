"""Traces on fake cpu give what the real CPU allocator counts."""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import measure, trace
from tests.modules import Parts
from tests.processes import in_thread
from tests.results import in_a_trace
from tests.tracing.programs import MODELS, PROGRAMS, differences


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["backward", "AdamW"])
def test_models(name: str, optimizer: Callable[..., torch.optim.Optimizer] | None) -> None:
    build, make_input = MODELS[name]
    model, x = build(), make_input()
    traced = trace(model, x, host="here", optimizer=optimizer)
    assert differences(traced, measure(model, x, optimizer=optimizer)) == {}
    again = trace(model, x, host="here", optimizer=optimizer)  # from plans that are remembered
    assert again.figures() == traced.figures()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program: Callable[[], None]) -> None:
    assert differences(trace(program, host="here"), measure(program)) == {}


def test_what_a_callable_is_given_is_the_baseline() -> None:
    x = torch.randn(64, requires_grad=True)
    assert trace(torch.exp, x, host="here").baseline == measure(torch.exp, x).baseline == 256


@pytest.mark.parametrize("backward", [False, True])
def test_callables_that_are_called_again(backward: bool) -> None:
    kept = []

    def step() -> torch.Tensor:
        weight = torch.ones(40, 40, requires_grad=True)
        output = (weight @ weight).relu()
        if backward:
            output.sum().backward()
        kept.append(output.detach())
        return output

    measured = measure(step, steps=3)
    kept.clear()
    traced = trace(step, steps=3, host="here")
    assert differences(traced, measured) == {}
    assert max(traced.timeline.steps()) == 2


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 500, (2, 32))
    traced = trace(model, input_ids=ids, labels=ids, host="here")
    assert differences(traced, measure(model, input_ids=ids, labels=ids)) == {}


def test_weights_that_transformers_reads(tmp_path: Path) -> None:
    """They are read on the program's thread, in a trace and for real."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=500, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    def program(device: str = "cpu") -> None:
        kind = transformers.GPT2LMHeadModel
        model = kind.from_pretrained(tmp_path, dtype=torch.bfloat16).to(device)
        model(torch.zeros(1, 8, dtype=torch.long).to(device)).logits.float().sum().backward()

    assert differences(trace(program, host="here"), measure(program)) == {}
    assert trace(lambda: program("cuda"), device="cuda").peak > 500 * 64 * 2


def test_files_that_are_mapped_are_memory(tmp_path: Path) -> None:
    """The whole file counts, as long as a tensor that was cut out of it lives."""
    raw, saved = tmp_path / "raw", tmp_path / "saved"
    raw.write_bytes(bytes(10_000))
    torch.save({"weight": torch.zeros(1000), "rest": torch.zeros(3000)}, saved)

    def mapped() -> None:
        storage = torch.UntypedStorage.from_file(str(raw), False, 10_000)
        piece = torch.empty(0, dtype=torch.uint8).set_(storage[:4000]).view(torch.float32)
        del storage
        piece = piece.to(torch.bfloat16)
        piece + piece

    def loaded() -> None:
        weight = torch.load(saved, mmap=True)["weight"]
        weight + weight

    for program in (mapped, loaded):
        traced, measured = trace(program, host="here"), measure(program)
        assert differences(traced, measured) == {}
        assert (traced.retained, traced.end) == (measured.retained, measured.end)
    assert traced.peak > saved.stat().st_size


def test_what_another_thread_makes_is_counted_until_it_dies() -> None:
    def program() -> None:
        in_thread(lambda: torch.nn.Linear(100, 100)).to("cpu")(torch.zeros(1, 100))

    traced = trace(program, host="here")
    parameters, activations = 4 * 101 * 100, 2 * 4 * 100
    assert (traced.peak, traced.end) == (parameters + activations, 0)


def test_reference_host_does_not_depend_on_this_machine() -> None:
    build, make_input = MODELS["perceptron"]
    model, x = build(), make_input()
    expected = trace(model, x).figures()
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            with torch.backends.mkldnn.flags(enabled=number != 2):
                assert trace(model, x).figures() == expected
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(threads)


@in_a_trace()
def test_copies_have_the_layout_that_is_asked_for(device: str) -> None:
    image = torch.zeros(2, 3, 4, 5, device=device)
    for copy in (image.contiguous(memory_format=torch.channels_last), image.mT.clone()):
        assert copy.stride() in ((60, 1, 15, 3), (60, 20, 1, 5))
    turned = image.clone(memory_format=torch.channels_last)
    assert turned.clone().stride() == turned.stride()
    assert turned.contiguous().stride() == image.stride()


def nested(levels: int) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(levels):
        model = nn.Sequential(model)
    return model


def test_modules_as_deep_as_python_lets_them_be(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # Python's own; libraries that other tests import raise it
    x = torch.ones(2, 4)
    nested(200)(x)
    assert trace(nested(200), x, host="here").figures() == measure(nested(200), x).figures()
    for run in (lambda model, x: model(x), trace):
        with pytest.raises(RecursionError):
            run(nested(400), x)


class Linked(Parts):
    """Blocks, each of which is an attribute of the one before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.first
        while block is not None:
            x, block = block.linear(x), block.following
        return x


def test_the_time_of_a_trace_is_linear_in_the_blocks_that_are_linked() -> None:
    def block(following: Any, _: int) -> Parts:
        return Parts(linear=nn.Linear(4, 4), following=following)

    def seconds(count: int) -> float:
        model = Linked(first=functools.reduce(block, range(count), None))
        start = time.process_time()
        assert trace(model, torch.ones(2, 4)).peak > 0
        return time.process_time() - start

    seconds(2)
    few, many = (min(seconds(count) for _ in range(2)) for count in (125, 1000))
    assert many < 20 * few  # and not 64 times as much
