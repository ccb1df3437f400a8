"""Launches of triton kernels: nothing is taken, what they write is computed, hooks run."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.errors import UnknownValueError, UnsupportedOperatorError
from tests.processes import run_program

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
N = 1000
launched: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_launched() -> None:
    launched.clear()


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 128}, pre_hook=lambda given: launched.append(("hook", given["n"]))),
        triton.Config({"BLOCK": 256}),
    ],
    key=["n"],
    reset_to_zero=["out_ptr"],
    prune_configs_by={"early_config_prune": lambda configs, given, **_: configs[given["n"] % 2 :]},
)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned(x_ptr, out_ptr, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + offsets, tl.load(x_ptr + offsets))


def test_a_launch_takes_nothing_and_without_values_what_it_writes_is_unknown() -> None:
    def program() -> None:
        x = torch.arange(N, device="cuda")
        out = torch.zeros_like(x)
        add[lambda meta: (launched.append(meta["BLOCK"]) or triton.cdiv(N, meta["BLOCK"]),)](
            x, x, out, N, BLOCK=256
        )
        launched.append(x.sum().item())
        launched.append(out.sum().item() == 0)

    profile = trace(program, device="cuda", values="none")
    assert profile.peak == 2 * N * 8 + 8
    assert launched == [256, N * (N - 1) // 2, False]
    assert "unknown value" in profile.warnings[0]


@triton.jit
def scaled(x, factor):  # type: ignore[no-untyped-def]
    return x * factor


@triton.jit
def sums(x_ptr, out_ptr, n, factor, SCALE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    if SCALE:
        x = scaled(x, factor)
    tl.atomic_add(out_ptr, tl.sum(x, 0))


@pytest.mark.parametrize("values", ["auto", "real"])
def test_what_a_kernel_writes_is_computed_by_the_interpreter(values: str) -> None:
    def program() -> None:
        x = torch.arange(N, device="cuda", dtype=torch.float32)
        out = torch.zeros(1, device="cuda")
        sums[(triton.cdiv(N, 64),)](x, out, N, 2.0, SCALE=True, BLOCK=64)
        assert out.item() == N * (N - 1)

    names = set(sums.fn.__globals__)
    trace(program, device="cuda", values=values)
    assert set(sums.fn.__globals__) == names
    with pytest.raises(RuntimeError, match="outside of the scope of a kernel"):
        scaled(1, 2)


def test_a_kernel_that_reads_beyond_its_tensors_is_not_computed() -> None:
    def program() -> None:
        x = torch.ones(N, device="cuda")
        out = torch.zeros(1, device="cuda")
        sums[(1,)](x, out, 1 << 20, 2.0, SCALE=False, BLOCK=1 << 20)
        assert out.item() == N

    with pytest.raises(UnknownValueError, match=r"kernel sums could not be computed .*beyond"):
        trace(program, device="cuda")


def test_a_launch_without_blocks_writes_nothing() -> None:
    def program() -> None:
        out = torch.zeros(N, dtype=torch.int64, device="cuda")
        add[(0,)](out, out, out, N, BLOCK=256)
        launched.append(out.sum().item())

    trace(program, device="cuda")
    assert launched == [0]


def test_autotuned_kernels_run_their_first_configuration() -> None:
    def program(n: int) -> None:
        x = torch.ones(n, dtype=torch.int64, device="cuda")
        out = torch.ones_like(x)
        for _ in range(2):
            tuned[lambda meta: (launched.append((meta["BLOCK"], meta["EVEN"])) or 1,)](x, out, n)
        launched.append(tuned.best_config.kwargs)

    assert trace(program, 1024, device="cuda").peak == 2 * 1024 * 8  # no benchmark's buffer
    hook = ("hook", 1024)
    assert launched == [hook, (128, True), hook, (128, True), {"BLOCK": 128}]
    launched.clear()
    trace(program, 1025, device="cuda")  # pruned: the first that is left
    assert launched == [(256, False), (256, False), {"BLOCK": 256}]
    assert not hasattr(tuned, "best_config")
    assert tuned.cache == {}


def test_what_autotuning_resets_is_reset_as_before_the_first_launch_of_a_kind() -> None:
    sums: list[int] = []
    kernel = tuned.fn.fn
    out = torch.ones(2, dtype=torch.int64)

    def program() -> None:
        given = out.to("cuda")
        kernel.add_pre_run_hook(lambda *args, **kwargs: sums.append(given.sum().item()))
        try:
            tuned[(1,)](given, given, 2)
        finally:
            kernel.pre_run_hooks.clear()

    trace(program, device="cuda")
    assert sums == [0]


@pytest.mark.parametrize("of", ["warmup", "launch"])
def test_a_kernel_that_is_not_compiled_can_be_launched_and_says_that_it_is_not(of: str) -> None:
    def program() -> None:
        x = torch.ones(N, device="cuda")
        if of == "warmup":
            compiled = add.warmup(x, x, x, N, BLOCK=64, grid=(1,))
        else:
            compiled = add[(1,)](x, x, x, N, BLOCK=64)
        compiled[(1,)](x, x, x, N, BLOCK=64)
        _ = compiled.n_regs

    with pytest.raises(UnsupportedOperatorError, match=r"\.n_regs of the triton kernel 'add'"):
        trace(program, device="cuda")


def test_memory_that_a_gpu_cannot_reach_is_refused_as_triton_does() -> None:
    def program(pinned: bool) -> None:
        x = torch.ones(N)
        x = x.pin_memory() if pinned else x
        add[(1,)](torch.ones(N, device="cuda"), x, x, N, BLOCK=64)

    trace(program, True, device="cuda")
    with pytest.raises(ValueError, match=r"Pointer argument \(at 1\) cannot be accessed.*y_ptr"):
        trace(program, False, device="cuda")
    with pytest.raises(UnsupportedOperatorError, match=r"test_triton.*'add' needs a GPU"):
        trace(lambda: add[(1,)](None, None, None, 0, BLOCK=64))


def test_the_driver_answers_for_the_gpu_of_the_trace_and_is_put_back() -> None:
    def program() -> list[Any]:
        driver = triton.runtime.driver.active
        launched.append(driver.get_current_target().arch)
        launched.append(driver.utils.get_device_properties(0)["multiprocessor_count"])
        launched.append(str(driver.get_active_torch_device()))
        driver.load_binary()
        return launched

    before = dict(vars(triton.runtime.driver)), triton.JITFunction.run
    with pytest.raises(UnsupportedOperatorError, match="load_binary"):
        trace(program, device="cuda", gpu="h100")
    assert launched == [90, 132, "cuda:0"]
    assert (dict(vars(triton.runtime.driver)), triton.JITFunction.run) == before


def test_operators_of_triton_kernels_are_counted_with_what_their_bodies_make():
    @torch.library.triton_op("torchmem_tests::add_twice", mutates_args={})
    def add_twice(x: Tensor, y: Tensor) -> Tensor:
        between, out = torch.empty_like(x), torch.empty_like(x)
        kernel = torch.library.wrap_triton(add)
        kernel[(1,)](x, y, between, N, BLOCK=1024)
        kernel[(1,)](between, y, out, N, BLOCK=1024)
        return out

    add_twice.register_autograd(lambda ctx, gradient: (gradient, None))

    def program() -> None:
        x = torch.ones(N, device="cuda", requires_grad=True)
        add_twice(x, x.detach()).sum().backward()
        torch.library.wrap_triton(add)[(1,)](x, x, x, N, BLOCK=1024)

    profile = trace(program, device="cuda")
    assert profile.forward_peak == 3 * N * 4  # x, what is between and the output
    assert profile.unknown_workspaces == ()


_IMPORTED_IN_THE_TRACE = """
import sys
import torch
from pytest_torchmem import trace

def program():
    from kernels import negate
    x = torch.ones(64, device="cuda")
    negate[(1,)](x, BLOCK=64)

assert "triton" not in sys.modules
assert trace(program, device="cuda").peak == 256
"""


def test_triton_may_be_imported_in_the_trace(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        kernels="""
import triton, triton.language as tl
@triton.jit
def negate(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, -tl.load(x_ptr + offsets))
"""
    )
    run_program(_IMPORTED_IN_THE_TRACE)


def test_a_missing_triton_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])

    def program() -> None:
        import triton  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match=r"'triton'\. torch for CUDA brings triton"):
        trace(program, device="cuda")
    with pytest.raises(ModuleNotFoundError, match=r"'triton'$"):
        trace(program)
