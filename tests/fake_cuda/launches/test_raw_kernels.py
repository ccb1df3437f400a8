"""Kernels in CUDA C++, addresses for other packages, and what kernels of Triton write to."""

import pytest
import torch

from pytest_torchmem import trace
from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.fake_cuda.triton import written_arguments
from tests.results import in_a_trace


@in_a_trace("cuda")
def test_a_pointwise_kernel_makes_what_it_returns() -> None:
    code = "template <typename T> T twice(T x, T y) { return x + y; }"
    function = torch.cuda.jiterator._create_jit_fn(code)
    half = torch.ones(3, 4, dtype=torch.half, device="cuda").t()
    single = torch.ones(4, 1, device="cuda")
    for made, dtype in ((function(half), torch.half), (function(half, single), torch.float)):
        assert (made.shape, made.stride()) == ((4, 3), (1, 4))
        assert (made.dtype, str(made.device)) == (dtype, "cuda:0")
    several = torch.cuda.jiterator._create_multi_output_jit_fn(code, num_outputs=2)
    assert len(several(half)) == 2


def test_an_address_on_the_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"test_raw_kernels.*cupy.*custom_op"):
        trace(lambda: torch.ones(3, device="cuda").__cuda_array_interface__, device="cuda")
    trace(lambda: hasattr(torch.ones(3), "__cuda_array_interface__") and 1 / 0, device="cuda")


@pytest.mark.parametrize("how", ["files", "text"])
def test_an_extension_for_cuda_is_not_compiled(how: str) -> None:
    def program() -> None:
        from torch.utils.cpp_extension import load, load_inline

        if how == "files":
            extension = load("mine", ["bind.cpp", "kernel.cu"])
        else:
            extension = load_inline("mine", "", "__global__ void f() {}", functions=["f"])
        extension.f(torch.ones(3, device="cuda"))

    with pytest.raises(UnsupportedOperatorError, match=r"mine\.f is compiled for a GPU.*custom_op"):
        trace(program, device="cuda")


@in_a_trace("cuda")
def test_the_extension_of_peft_makes_matrices_of_blocks() -> None:
    from torch.utils.cpp_extension import load

    extension = load("fbd_cuda", ["fbd_cuda.cpp", "fbd_cuda_kernel.cu"])
    blocks = torch.arange(1.0, 13.0, device="cuda").view(1, 3, 2, 2)
    before = torch.cuda.memory_allocated()
    (matrices,) = extension.forward(blocks)
    assert torch.cuda.max_memory_allocated() - before == 512
    assert torch.equal(matrices[0], torch.block_diag(*blocks[0]))
    assert torch.equal(extension.backward(matrices * 2, blocks)[0], blocks * 2)


triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def helper(source, target, i):  # type: ignore[no-untyped-def]
    tl.store(target + i, tl.load(source + i))
    return source


@triton.jit
def through_helpers(a, b, c, d, n):  # type: ignore[no-untyped-def]
    pointer = a
    for i in range(n):
        pointer = helper(pointer, b, i)
        c += i
    tl.atomic_max(c, tl.sum(tl.load(d + tl.arange(0, 8)), axis=0))


@triton.jit
def through_tuples(a, b, c, SWAP: tl.constexpr):  # type: ignore[no-untyped-def]
    first, second = a, b
    if SWAP:
        first, second = second, first
    block = tl.make_block_ptr(first, (8,), (1,), (0,), (8,), (0,))
    tl.store(tl.advance(block, (0,)), tl.load(c + tl.arange(0, 8)) + tl.load(second))


@triton.jit
def descriptors(a, b):  # type: ignore[no-untyped-def]
    b.store([0, 0], a.load([0, 0]))


@triton.jit
def with_a_function(a, b, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    activation(a)
    tl.store(b, 1)


@triton.jit
def with_addresses(table, out):  # type: ignore[no-untyped-def]
    address = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(address, tl.load(out))


@triton.jit(do_not_specialize=["n"], repr=lambda _: "named")
def returns_early(a, b, n):  # type: ignore[no-untyped-def]
    if tl.load(a + tl.program_id(0)) == n:
        return
    while n > 0:
        tl.store(b + n, 0)
        n -= 1


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (helper, {"target"}),
        (through_helpers, {"b", "c"}),
        (through_tuples, {"a", "b"}),
        (descriptors, {"b"}),
        (with_a_function, {"a", "b"}),
        (with_addresses, None),
        (returns_early, {"b"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_written_arguments(kernel: object, written: set[str] | None) -> None:
    found = written_arguments(kernel)
    pointers = {"a", "b", "c", "d", "target", "source", "table", "out"}
    assert (found if found is None else found & pointers) == written


def test_a_kernel_without_source_writes_to_everything() -> None:
    class Kernel:
        fn = len

    assert written_arguments(Kernel()) is None
