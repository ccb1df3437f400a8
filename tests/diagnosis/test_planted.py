"""Every rule recognises its planted regression, on both devices, from what a snapshot keeps."""

import functools
import gc
import importlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.checks.check import DeviceCheck
from pytest_torchmem.checks.result import Changed, CheckResult, Outcome, SnapshotResult
from pytest_torchmem.diagnosis.causes import RULES
from pytest_torchmem.diagnosis.diagnose import Diagnosis, diagnose
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.reports.text import MOST_LINES, message
from pytest_torchmem.snapshots.alive import What, alive_of
from pytest_torchmem.snapshots.compare import compare, entry_of
from pytest_torchmem.snapshots.format import Entry, Key, Snapshot, dump, load
from pytest_torchmem.snapshots.tolerance import BUILT_IN
from tests.diagnosis.planted import NOT_THE_CAUSE, PLANTED, Decoder, Step
from tests.diagnosis.real_models import bert, gpt2, ids, llama
from tests.modules import Parts


@pytest.fixture(scope="module", autouse=True)
def _what_models_import_is_left_out_of_collections() -> None:
    """As what is imported before: who holds a tensor is looked for among all objects of Python."""
    for make in (bert, gpt2, llama):
        make()
    gc.collect()


@pytest.fixture(autouse=True)
def _what_other_tests_left_is_not_looked_through(_what_models_import_is_left_out_of_collections):
    gc.freeze()


def profile_of(step: tuple[Any, ...], device: str) -> MemoryProfile:
    target, args, options = step
    if args is None:
        return trace(functools.partial(target, device), device=device)
    return trace(target, *args, **options, device=device)


class _Target:
    """What a check would trace once more."""

    def __init__(self, build: Callable[[bool], Step]) -> None:
        self.build = build

    def trace(self, device, gpu, world, **others: Any) -> MemoryProfile:
        return profile_of(self.build(True), device)


def stored(entry: Entry) -> Entry:
    """Return an entry as it comes back from its file, of a program with lines that are gone."""
    found = load(dump(Snapshot({entry.key: entry}))).entries[entry.key]
    assert found.alive is not None
    groups = (replace(one, what=moved(one.what)) for one in found.alive.groups)
    return replace(found, alive=replace(found.alive, groups=tuple(groups)))


def moved(what: What) -> What:
    """Return what stood some lines further down, if it stands in the program."""
    file, _, number = what.line.rpartition(":")
    own = file.startswith("tests/")
    return what._replace(line=f"{file}:{int(number) + 7}") if own else what


def told(build: Callable[[bool], Step], device: str) -> tuple[str, Diagnosis]:
    result, found = judged(build, device)
    return message(result), found


def judged(build: Callable[[bool], Step], device: str) -> tuple[CheckResult, Diagnosis]:
    key = Key("test_it", device=device, gpu="a100-80gb" if device == "cuda" else "")
    before = stored(entry_of(key, profile_of(build(False), device)))
    profile = profile_of(build(True), device)
    alive = alive_of(profile)
    now = entry_of(key, profile, lambda: alive)
    comparison = compare(before, now, [BUILT_IN])
    moment = comparison.grown_moment
    assert moment, comparison
    found = diagnose(before, now, moment, alive, profile)
    seen = DeviceCheck(key, None, _Target(build), None).watched(profile, found)
    if seen is not None:
        found = diagnose(before, now, moment, alive, profile, seen)
    finding = Changed(outcome=Outcome.GREW, comparison=comparison, diagnosis=found)
    snapshot = SnapshotResult("file", now, comparison, before, found)
    return CheckResult(key, (finding,), snapshot=snapshot), found


def told_or_of_newer_python(part: str, text: str) -> bool:
    """Return whether a part is told; which function a line calls is, since Python 3.11."""
    return part in text or (" (aten::" in part and sys.version_info < (3, 11))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: f"{Path(one.file).stem}-{one.name}")
def test_the_first_two_lines_name_cause_module_operator_and_line(planted, chance, monkeypatch):
    """On one of its devices, drawn anew in every run."""
    device = random.Random(f"{chance.random()} {planted.name}").choice(planted.devices)
    print(device)
    monkeypatch.setenv("COLUMNS", "400")
    result, found = judged(planted.build, device)
    text = message(result)
    first, second = text.splitlines()[:2]
    print(text)
    assert first.startswith("+")
    assert [one.rule for one in found.causes][:1] == [planted.rule]
    assert told_or_of_newer_python(planted.words, first)
    assert planted.module in second
    assert told_or_of_newer_python(planted.operator, second)
    place = second.partition(", called in tests/")[0]
    assert place.endswith(planted.line) or second.endswith(planted.line)
    difference = found.difference
    assert sum(row.change for row in difference.rows) + difference.rest == difference.change
    monkeypatch.setenv("COLUMNS", "80")
    assert len(message(result).splitlines()) <= MOST_LINES


def test_what_leads_to_a_line_that_was_there_before_is_told(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    planted = next(one for one in PLANTED if one.name == "validated_with_more")
    lines = Path(planted.file).read_text(encoding="utf-8").splitlines()
    outer = next(n for n, one in enumerate(lines, 1) if one.endswith(f"# outer: {planted.name}"))
    second = message(judged(planted.build, "cpu")[0]).splitlines()[1]
    assert second.endswith(f"{planted.line}, called in tests/diagnosis/planted.py:{outer}")


def test_a_message_has_few_lines_unless_everything_is_asked_for(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    planted = next(one for one in PLANTED if one.name == "no_checkpoints")
    result, _ = judged(planted.build, "cuda")
    text = message(result)
    lines = text.splitlines()
    print(text)
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80 - len("E       ")
    assert all(line.count("[") == line.count("]") for line in lines)
    assert "more rows" in text
    assert "baseline" not in text
    everything = message(result, verbose=True)
    assert "more rows" not in everything
    assert "baseline" in everything


def test_another_torch_is_told_where_nothing_else_has_changed() -> None:
    key = Key("test_it", device="cuda", gpu="a100-80gb")
    profile = profile_of((gpt2(), (ids(),), {}), "cuda")
    alive = alive_of(profile)
    now, moment = entry_of(key, profile, lambda: alive), "backward_peak"
    tensors = (group for group in alive.groups if group.what.dtype)  # and no library's buffer
    largest = max(tensors, key=lambda group: group.nbytes(moment))
    fewer = replace(alive, groups=tuple(one for one in alive.groups if one is not largest))
    figures = {**now.figures, moment: now.figures[moment] - largest.nbytes(moment)}
    before = replace(now, torch="2.12.0", alive=fewer, figures=figures)
    [cause] = diagnose(before, now, moment, alive, profile).causes
    assert cause.text == f"torch is {now.torch}, and was 2.12.0"


def test_an_error_of_a_rule_loses_no_failure(monkeypatch) -> None:
    rule = replace(RULES["held"], find=lambda evidence: evidence.nothing)
    monkeypatch.setitem(RULES, "held", rule)
    planted = next(one for one in PLANTED if one.name == "no_checkpoints")
    with pytest.warns(RuntimeWarning, match="cause 'held' could not be looked for: Attribute"):
        assert message(judged(planted.build, "cpu")[0]).startswith("+")


def test_free_blocks_that_are_no_longer_given_back() -> None:
    def sizes(wrong: bool, device: str) -> None:
        for size in (4, 6, 8):
            torch.zeros(size << 20, device=device)
            if not wrong:
                torch.cuda.empty_cache()

    result, _ = judged(lambda wrong: (functools.partial(sizes, wrong), None, {}), "cuda")
    said = "torch.cuda.empty_cache() is called no more, and was 3 times at"
    assert said in " ".join(message(result).split())


def test_a_recomputed_module_is_in_the_modes_of_its_first_call() -> None:
    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = Decoder(depth=1, recompute=(0,))(ids()).sum()
        loss.backward()

    modes = trace(run, device="cpu").facts["modes"]
    assert [name for name in modes if modes[name][0].name == "autocast"] == ["Decoder"]


def test_every_rule_is_planted() -> None:
    assert set(RULES) == {one.rule for one in PLANTED} | {"torch", "process settings", "emptied"}


def test_a_snapshot_of_a_deep_decoder_on_both_devices_is_short() -> None:
    model, entries = gpt2(n_layer=32), {}
    for device in ("cpu", "cuda"):
        key = Key("test_it", device=device, gpu="a100-80gb" if device == "cuda" else "")
        profile = trace(model, ids(), device=device, optimizer=torch.optim.AdamW)
        entries[key] = entry_of(key, profile)
    assert 0 < len(dump(Snapshot(entries)).splitlines()) < 400


@pytest.mark.parametrize("build", NOT_THE_CAUSE)
def test_what_only_looks_like_a_cause_is_not_named(build, chance):
    """On one of the devices, drawn anew in every run."""
    device = random.Random(f"{chance.random()} {build.__name__}").choice(["cpu", "cuda"])
    print(device)
    text, found = told(build, device)
    print(text)
    assert not {cause.rule for cause in found.causes} & NOT_THE_CAUSE[build]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A function that makes a library of a text, where libraries are."""
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "site-packages").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site-packages")

    def install(name: str, text: str) -> Any:
        (tmp_path / "site-packages" / f"{name}.py").write_text(text)
        return importlib.import_module(name)

    return install


def test_a_function_of_a_library_is_told_with_the_line_that_calls_it(installed):
    text = "def squares(x, times):\n    return [x.square() for _ in range(times)]\n"
    squares = installed("some_functions", text).squares

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            squares(outputs := super().forward(x), 1)  # none of which is there at the peak
            return sum(squares(outputs, self.times))

    def build(wrong: bool) -> Step:
        model = Own(8, 64)
        model.times = 4 if wrong else 1
        return model, (torch.zeros(32, 8),), {}

    text, _ = told(build, "cpu")
    line = Own.forward.__code__.co_firstlineno + 2
    second = text.splitlines()[1]
    assert "in Own, some_functions.py:2, called in tests" in second
    assert second.endswith(f"test_planted.py:{line}")
    assert "and" not in second.partition(", called in ")[2]


def test_a_module_of_a_library_is_told_with_the_line_that_calls_it(installed):
    squares = installed(
        "some_library",
        "from torch import nn\n"
        "class Squares(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).square()\n",
    ).Squares

    class Own(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sin()

    def build(wrong: bool) -> Step:
        inner = nn.Sequential(squares(8, 64 if wrong else 8), nn.Tanh())
        return Own(inner=inner), (torch.zeros(32, 8),), {}

    text, _ = told(build, "cpu")
    line = Own.forward.__code__.co_firstlineno + 1
    second = text.splitlines()[1]
    assert second.startswith("aten::")
    assert "Own.inner.0, some_library.py:4, called in " in second
    assert second.endswith(f"test_planted.py:{line}")


def _workspace_of_cublas(wrong: bool) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":65536:8" if wrong else ":4096:8"


def _without_flash_attention(wrong: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(not wrong)
    torch.backends.cuda.enable_mem_efficient_sdp(not wrong)


def _in_double(wrong: bool) -> None:
    torch.set_default_dtype(torch.float64 if wrong else torch.float32)


class Linear(nn.Linear):
    """A layer whose forward is compiled, after it was told how."""

    def waves(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin().exp().cos().exp().sin()


def _eagerly(wrong: bool) -> None:
    Linear.forward = torch.compile(Linear.waves, backend="eager" if wrong else "inductor")


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (_eagerly, "torch.compile(backend=) is eager, and was not set"),
        (_workspace_of_cublas, "CUBLAS_WORKSPACE_CONFIG is :65536:8, and was :4096:8"),
        (_without_flash_attention, ": fused kernels are switched off"),
        (_in_double, "torch.set_default_dtype is torch.float64, and was not set"),
    ],
)
def test_a_setting_that_a_library_changed_at_import_is_named_first(monkeypatch, put, words):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")

    def build(wrong: bool) -> Step:
        put(wrong)

        def run(device: str) -> None:
            linear = Linear(64, 64, device=device)
            x = linear(torch.ones(4, 128, 64, device=device))
            heads = x.view(4, 128, 4, 16).transpose(1, 2)
            nn.functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()

        return run, None, {}

    try:
        result, _ = judged(build, "cuda")
    finally:
        put(False)
    first = message(result).splitlines()[0]
    assert words in first


def test_what_is_larger_and_of_a_wider_type_has_two_causes(device: str) -> None:
    def build(wrong: bool) -> Step:
        class Up(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                made = super().forward(x)
                return (made.float() if wrong else made).sigmoid().exp()

        class Padded(Parts):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.up(nn.functional.pad(x, (0, 0, 0, 256 if wrong else 64)))

        model = Padded(up=Up(64, 1024)).bfloat16()
        return model, (torch.zeros(192, 64, dtype=torch.bfloat16),), {}

    text = " ".join(told(build, device)[0].split())
    assert "Padded.up is given [448, 64] of " in text
    assert "float32[448, 1024] of the bfloat16 of" in text or "bfloat16 became float32" in text
