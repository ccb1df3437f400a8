"""Which arguments of a triton kernel count as written to, by its source."""

import pytest

from pytest_torchmem.fake_cuda.triton import written_arguments

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
