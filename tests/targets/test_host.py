"""The CPU that a trace stands for, and how sure its figures are where that was not checked."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.interception.values import computed
from pytest_torchmem.operators.convolution import onednn
from pytest_torchmem.operators.libraries.onednn.problem import Problem
from pytest_torchmem.profile.timeline import Confidence, Kind
from pytest_torchmem.targets import host
from pytest_torchmem.targets.host import REFERENCE, this_machine
from pytest_torchmem.tracing import trace as tracing

CHECKED = (torch.float32, torch.bfloat16)


def write_caches(directory: Path, *entries: tuple[int, str, str, str]) -> Path:
    """Describe caches as Linux does: level, type, size and the CPUs that share them."""
    for number, texts in enumerate(entries):
        index = directory / f"index{number}"
        index.mkdir()
        for name, text in zip(("level", "type", "size", "shared_cpu_list"), texts, strict=True):
            (index / name).write_text(f"{text}\n")
    return directory


def test_caches_are_those_of_a_core(tmp_path: Path) -> None:
    """Two threads of a core share its caches; a cluster of four cores shares its second level."""
    caches = write_caches(
        tmp_path,
        (1, "Data", "32K", "0,8"),
        (1, "Instruction", "64K", "0,8"),
        (2, "Unified", "4096K", "0-3,8-11"),
        (3, "Unified", "32768K", "0-15"),
    )
    assert host._caches(caches) == (32 * 1024, 1024 * 1024)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"l1d_cache_size": 49152, "l2_cache_size": 2097152}, (49152, 2097152)),
        ({}, (32 * 1024, 512 * 1024)),
    ],
)
def test_caches_without_linux(monkeypatch, tmp_path, known, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert host._caches(tmp_path) == expected


@pytest.mark.parametrize(
    ("present", "most", "expected"),
    [
        ({"avx2": True, "avx512_bw": True, "avx512_bf16": True}, "", "avx512_core_bf16"),
        ({"avx2": True, "avx512_bw": True, "amx_tile": True}, "", "avx512_core_amx"),
        ({"avx2": True, "avx512_bw": True, "amx_tile": True}, "AVX512_CORE", "avx512_core"),
        ({"avx2": True, "avx512_bw": False, "l1d_cache_size": 1}, "ALL", "avx2"),
        ({"neon": True}, "", "unknown"),
    ],
)
def test_instructions_that_onednn_dispatches_on(monkeypatch, present, most, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: present, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    assert this_machine().instructions == expected


def test_both_sources_name_the_same_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/cpuinfo").exists():
        pytest.skip("the processor's flags are read from Linux")
    found = this_machine().instructions
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert this_machine().instructions == found


def test_the_reference_host_was_checked() -> None:
    assert all(REFERENCE.is_checked(dtype) for dtype in CHECKED)
    plain = REFERENCE._replace(instructions="avx512_core")
    assert [plain.is_checked(dtype) for dtype in CHECKED] == [True, False]
    for change in ({"instructions": "avx2"}, {"onednn": (3, 14)}, {"onednn": ()}):
        assert not any(REFERENCE._replace(**change).is_checked(dtype) for dtype in CHECKED)


@pytest.mark.parametrize(
    ("instructions", "dtype", "sure"),
    [
        ("avx512_core_bf16", torch.bfloat16, True),
        ("avx512_core", torch.float32, True),
        ("avx512_core", torch.bfloat16, False),
        ("avx2", torch.float32, False),
    ],
)
def test_estimates_say_so(monkeypatch, instructions, dtype, sure):
    machine = REFERENCE._replace(name="here", instructions=instructions)
    monkeypatch.setitem(tracing._HOSTS, "here", lambda: machine)
    monkeypatch.setattr(computed, "LARGEST", 0)  # of a call that is not run here
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).to(dtype)
    x = torch.zeros(2, 8, 9, 9, dtype=dtype)
    found, reference = trace(model, x, host="here"), trace(model, x)
    assert found.figures() == reference.figures()
    operators = () if sure else ("aten::convolution", "aten::convolution_backward")
    assert found.unknown_workspaces == operators
    assert not reference.warnings
    if sure:
        assert not found.warnings
    else:
        (told,) = found.warnings
        assert "is an estimate" in told
        assert f"this CPU has {instructions}" in told
    kinds = {a.confidence for a in found.timeline.allocations if a.kind is Kind.WORKSPACE}
    assert kinds == {Confidence.EXACT if sure else Confidence.UNKNOWN}


def test_estimates_on_a_cpu_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and attention are oneDNN's in bfloat16 alone."""
    machine = REFERENCE._replace(instructions="avx512_core_amx")
    monkeypatch.setitem(tracing._HOSTS, "here", lambda: machine)
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def step(dtype: torch.dtype) -> None:
        query = torch.zeros(1, 2, 32, 64, dtype=dtype, requires_grad=True)
        weight = torch.zeros(64, 64, dtype=dtype, requires_grad=True)
        found = nn.functional.scaled_dot_product_attention(query, query, query)
        (found.reshape(64, 64) @ weight).sum().backward()

    assert trace(step, torch.float32, host="here").unknown_workspaces == ()
    estimated = trace(step, torch.bfloat16, host="here").unknown_workspaces
    assert estimated == (attention, f"{attention}_backward", "aten::mm")


@pytest.mark.parametrize(
    ("filters", "kernel", "dilation", "caches"),
    [(64, (5, 3), 12, {"l1": 32 * 1024}), (3, (3, 3), 1, {"l2": 64 * 1024})],
)
def test_caches_decide_which_kernel_and_blocks(filters, kernel, dilation, caches):
    """Whether padding fits the pixels computed at a time, and how large blocks of columns are."""
    height, width = (
        size + 24 - dilation * (taps - 1) for size, taps in zip((60, 28), kernel, strict=True)
    )
    problem = Problem(
        host=REFERENCE,
        dtype=torch.float32,
        dims=2,
        batch=32,
        groups=1,
        channels=64,
        filters=filters,
        input=(1, 60, 28),
        output=(1, height, width),
        kernel=(1, *kernel),
        stride=(1, 1, 1),
        dilation=(1, dilation, dilation),
        padding=(0, 12, 12),
        bias=False,
        channels_last=False,
    )
    smaller = problem._replace(host=REFERENCE._replace(**caches))
    assert onednn.forward_primitive(smaller) != onednn.forward_primitive(problem)
