"""Kernels that call other operators, and what decides their outputs by value."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual

from pytest_torchmem import MemoryProfile, measure, trace
from pytest_torchmem.operators.libraries import lapack
from pytest_torchmem.operators.libraries.lapack import Lapack
from pytest_torchmem.targets.host import REFERENCE, this_machine
from tests.modules import Parts
from tests.operators.workspaces import skip_estimates
from tests.results import as_measured, on_fake_cuda


def compare(function: Callable[..., object], *args: Tensor) -> MemoryProfile:
    """Return a trace, which counts what the allocator does, with a backward where args want one."""
    if not args:
        return as_measured(function)
    target = Parts(forward=function)
    return as_measured(target, *args, backward=any(one.requires_grad for one in args))


@pytest.mark.parametrize(
    "program",
    [
        *(torch.linalg.slogdet, torch.linalg.inv, torch.linalg.svd),
        *(torch.matrix_exp, torch.fft.rfft2, torch.histc),
    ],
    ids=lambda program: program.__name__,
)
def test_batches_of_matrices(program: Callable[..., Tensor]) -> None:
    compare(program, torch.randn(3, 40, 40))


def test_products_of_matrices_in_bfloat16_take_buffers_of_their_own() -> None:
    skip_estimates(torch.bfloat16)
    compare(torch.matrix_exp, torch.randn(5, 2, 10, 10).bfloat16())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("ends", [False, True])
def test_bags_of_embeddings(mode: str, dtype: torch.dtype, ends: bool) -> None:
    """In so small ones temporaries decide."""

    def step() -> Tensor:
        table = torch.ones(10, 3, requires_grad=True)
        words, bags = torch.arange(6, dtype=dtype), torch.tensor([0, 2, 2, 5 + ends], dtype=dtype)
        given: dict[str, Any] = {"mode": mode, "include_last_offset": ends}
        with torch.no_grad():
            F.embedding_bag(words, table, bags, **given)
        output: Tensor = F.embedding_bag(words, table, bags, **given)
        output.sum().backward()
        return output

    compare(step)


@pytest.mark.parametrize("types", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
@pytest.mark.parametrize(
    "given", [{"mode": "mean"}, {"padding_idx": 1}, {"sparse": True}, {"weighted": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bags_of_positions_of_two_types(types, given, dtype):
    found: list[list[float]] = []

    def step(device: str = "cpu") -> None:
        options: dict[str, Any] = {"mode": "sum", **given}
        table = torch.ones(5, 2, dtype=dtype, device=device, requires_grad=True)
        weights = torch.ones(6, dtype=dtype, device=device, requires_grad=True)
        words = torch.tensor([3, 1, 1, 1, 4, 0], dtype=types[0], device=device)
        bags = torch.tensor([0, 0, 3, 3, 6], dtype=types[1], device=device)
        if options.pop("weighted", False):
            options["per_sample_weights"] = weights
        F.embedding_bag(words, table, bags, **options).sum().backward()
        gradients = [one.grad for one in (table, weights) if one.grad is not None]
        found.append([one.to_dense().sum().item() for one in gradients])

    compare(step)
    trace(step, "cuda", device="cuda")
    assert found == found[:1] * len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_renorm_in_place(dtype: torch.dtype) -> None:
    def step() -> None:
        input = torch.ones(8, 16, dtype=dtype)
        input.t().renorm_(2, 0, 1.0).renorm(1, 1, 0.5)

    assert not compare(step).unknown_workspaces


def test_rows_that_lie_in_storages_of_several_sizes() -> None:
    def step() -> list[Any]:
        kept: list[Any] = []
        for rows in (8, 1, 3):
            row = torch.ones(rows, 6)[rows // 2]
            kept += [torch.slice_scatter(row, row[:2], 0, 1, 3), torch.ops.aten.copy(row, row)]
            kept += torch.func.jvp(torch.func.grad(lambda t: t[None].sin().sum()), (row,), (row,))
            with dual_level():
                kept.append(make_dual(row, torch.eye(6)[1])[None].sum())
        return kept

    compare(step)


@pytest.mark.parametrize("values", ["auto", "real"])
def test_values_decide_anew_what_a_body_takes(values: str) -> None:
    """The second mask has more elements than the first, in the same geometry."""
    kept: list[list[list[int]]] = []

    def step() -> None:
        mask = torch.zeros(40, 50, dtype=torch.bool)
        for rows in (1, 39, 2):
            mask[:rows] = True
            kept.append(torch.nonzero_static(mask, size=60).tolist())
            mask.zero_()
        torch.nonzero_static(mask.t(), size=0)
        torch.nonzero_static(mask.any(), size=2)

    traced = trace(step, host="here", values=values).figures()  # type: ignore[arg-type]
    assert traced == measure(step).figures()
    assert kept[:3] == kept[3:]


FACTORS: dict[str, Callable[..., object]] = {
    "qr": lambda a, b: torch.linalg.qr(a),
    "complete": lambda a, b: torch.linalg.qr(a, "complete"),
    "product": lambda a, b: torch.linalg.householder_product(*torch.geqrf(a)),
    "ormqr": lambda a, b: torch.ormqr(*torch.geqrf(a), b),
    **{f"gels{one}": partial(torch.linalg.lstsq, driver=f"gels{one}") for one in ("", *"yds")},
    "eigh": lambda a, b: torch.linalg.eigh(a @ a.mH),
    "eig": lambda a, b: torch.linalg.eig(a @ a.mH),
    "eigvals": lambda a, b: torch.linalg.eigvals(a @ a.mH),
    "ldl_factor": lambda a, b: torch.linalg.ldl_factor(a @ a.mH),
    "hermitian": lambda a, b: torch.linalg.ldl_factor(a @ a.mH, hermitian=True),
    "lu": lambda a, b: torch.linalg.lu(a @ a.mH),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("name", FACTORS)
def test_work_of_lapack_is_what_it_asks_for_here(name: str, dtype: torch.dtype) -> None:
    for shape in ((70, 64), (2, 33, 5)):
        matrices, sides = torch.randn(shape, dtype=dtype), torch.randn((*shape[:-1], 3)).to(dtype)
        compare(FACTORS[name], matrices, sides)


def test_a_lapack_that_cannot_be_asked_is_the_reference_one(monkeypatch):
    here, reference = (Lapack(each, torch.float32) for each in (this_machine(), REFERENCE))
    assert lapack.lengths("geqrg", torch.float32, (), 1) is None
    assert lapack.lengths("geqrf", torch.float32, (2**31,), 1) is None
    monkeypatch.setattr("pytest_torchmem.operators.libraries.lapack.lengths", lambda *_: None)
    assert here.geqrf(64, 48) == reference.geqrf(64, 48) == 32 * 48 + 1
    assert here.syevd(8, True) == reference.syevd(8, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3,), (5, 7)])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("replacement", [False, True])
def test_samples_of_a_distribution(dtype, shape, samples, replacement):
    """native/Distributions.cpp keeps what says that a row is all zeros until the end."""
    compare(lambda x: torch.multinomial(x, samples, replacement), torch.ones(shape, dtype=dtype))


def test_a_mask_takes_more_than_its_positions_do() -> None:
    x, mask = torch.randn(200, 8), torch.arange(200) % 2 == 0
    positions = mask.nonzero().squeeze(1)
    for index in (mask, positions, mask):  # the same geometry once the mask is resolved
        compare(lambda x, index: x[index], x, index)


QUANTIZED: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda x, *_: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    lambda x, *_: torch.fake_quantize_per_tensor_affine(x, torch.ones(1), zeros(1), 0, 255),
    lambda x, *_: torch.fake_quantize_per_channel_affine(x, torch.ones(16), zeros(16), 1, 0, 255),
    lambda x, scale, zero: LEARNABLE["tensor"](x, scale[:1], zero[:1], 0, 255, 1.0),
    lambda x, scale, zero: LEARNABLE["channel"](x, scale, zero, 1, 0, 255, 1.0),
]
zeros = partial(torch.zeros, dtype=torch.int32)
LEARNABLE: dict[str, Any] = {
    each: getattr(torch, f"_fake_quantize_learnable_per_{each}_affine")
    for each in ("tensor", "channel")
}


@pytest.mark.parametrize("quantized", QUANTIZED)
def test_fake_quantization(quantized: Callable[..., Tensor]) -> None:
    inputs = torch.randn(40, 16), torch.full((16,), 0.1), torch.zeros(16)
    inputs = [each.requires_grad_() for each in inputs]
    assert not compare(lambda *given: quantized(*given).sin(), *inputs).warnings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(
    "program",
    [
        *(torch.cholesky, torch.cholesky_inverse, torch.geqrf, torch.linalg.cholesky),
        *(torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.inv, torch.linalg.qr),
        lambda x: torch.linalg.solve(x, x[..., :1]),
        lambda x: torch.ormqr(x, x[..., 0], x),
        lambda x: torch.linalg.lstsq(x, x, driver="gelsy"),
    ],
)
def test_work_of_lapack(program: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """What small matrices take: work arrays, and what says whether it succeeded."""
    for shape in ((5, 5), (3, 2, 2)):
        matrices = torch.eye(shape[-1], dtype=dtype).expand(shape) * 3
        compare(lambda x: (program(x), None)[1], matrices)


def test_matrices_of_special_kinds() -> None:
    compare(torch.linalg.eig, torch.eye(5, dtype=torch.complex64))
    for shape in ((0, 0), (2, 0, 0)):
        compare(torch.cholesky_inverse, torch.empty(shape))
    compare(torch.argwhere, torch.empty(5, 0, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("dim", [None, 0, (0, 1)])
def test_variance_of_complex_numbers(name: str, dim: object) -> None:
    """std_var_out: that of both parts, one after the other."""
    for dtype in (torch.complex64, torch.complex128, torch.float32):
        compare(lambda x: getattr(torch, name)(x, dim), torch.randn(30, 40, dtype=dtype))


def _outputs_given(device: str = "cpu") -> list[tuple[tuple[int, ...], float]]:
    parts = [torch.ones(4, device=device), torch.full((4,), 2.0, device=device)]
    functions: list[Callable[..., Tensor]] = [
        *(partial(torch.zeros, 8), partial(torch.ones, 8), partial(torch.full, (2, 4), 3.0)),
        *(partial(torch.stack, parts), partial(torch.cat, parts), partial(torch.arange, 0, 8)),
        *(partial(torch.linspace, 0, 7, 8), partial(torch.logspace, 0, 1, 8)),
    ]
    found = []
    for function in [*functions, *functions]:  # the second time by what is known from the first
        for shape in ((0,), (27,), (2, 2, 2)):
            out = torch.zeros(27, device=device).resize_(shape)
            assert function(out=out) is out
            found.append((tuple(out.shape), round(out.sum().item(), 2)))
    return found


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("values", ["auto", "real"])
def test_an_output_that_is_given_is_resized_each_time(device: str, values: str) -> None:
    found: list[Any] = []
    options: Any = {"device": device, "host": "here", "values": values}
    traced = trace(lambda: found.extend(_outputs_given(device)), **options)
    assert found[-48:] == _outputs_given()
    assert device == "cuda" or traced.figures() == measure(_outputs_given).figures()


MIB = 1024**2


def cuda(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="cuda")


def square_sum(size: int) -> None:
    torch.ops.aten._euclidean_dist(cuda(size, 64), cuda(size + 8, 64))


COMPOSITES: dict[str, Callable[[int], Any]] = {
    "_euclidean_dist": square_sum,
    "logdet": lambda n: torch.logdet(cuda(n % 64 + 2, 8, 8)),
    "select_backward": lambda n: torch.ops.aten.select_backward(cuda(n), [4, n], 0, 1),
    "std_mean": lambda n: torch.std_mean(cuda(n, 16).to(torch.complex64)),
    "cosine_embedding_loss": lambda n: F.cosine_embedding_loss(cuda(n, 32), cuda(n, 32), cuda(n)),
    "block_diag": lambda n: torch.block_diag(cuda(n, 8), cuda(8, n)),
    "linalg_pinv": lambda n: torch.linalg.pinv(cuda(n % 64 + 2, 8)),
    "roll": lambda n: torch.roll(cuda(n, 64), (1, 2), (0, 1)),
}


def told(profile: MemoryProfile) -> list[Any]:
    """Return what a timeline tells of every event."""
    allocations = profile.timeline.allocations
    return [(event > 0, allocations[abs(event) - 1]) for event in profile.timeline.events]


@pytest.mark.parametrize("name", COMPOSITES)
@settings(max_examples=12)
@given(size=st.integers(1, 5000))
def test_a_call_that_is_remembered_is_as_the_first(name, size):
    first, second = (trace(lambda: COMPOSITES[name](size), device="cuda") for _ in range(2))
    # An output is told of by the geometry that its maker gave it: the first time an inner operator.
    sizes = [[(made, found.nbytes, found.kind) for made, found in told(p)] for p in (first, second)]
    assert sizes[0] == sizes[1]
    assert first.figures() == second.figures()
    assert first.allocator_peaks() == second.allocator_peaks()


def test_the_host_sees_the_same_as_well() -> None:
    def body() -> None:
        torch.ops.aten._euclidean_dist(torch.empty(64, 8), torch.empty(32, 8))

    first, second = (trace(body) for _ in range(2))
    assert [found.nbytes for _, found in told(first)] == [found.nbytes for _, found in told(second)]


def test_out_of_memory_within_a_repeated_composite_gives_back_what_it_had() -> None:
    def body() -> tuple[int, int, int]:
        before = torch.cuda.memory_allocated()
        square_sum(4096)  # and cuBLAS's buffer stays
        rows, columns = cuda(4096, 64), cuda(4104, 64)
        hoard = cuda(18 * MIB // 4)
        allocated = torch.cuda.memory_allocated()
        with pytest.raises(torch.OutOfMemoryError, match="_euclidean_dist requested"):
            torch.ops.aten._euclidean_dist(rows, columns)
        after = torch.cuda.memory_allocated()
        del hoard
        torch.ops.aten._euclidean_dist(rows, columns)
        return before, allocated, after

    before, allocated, after = on_fake_cuda(body, gpu="a100", memory=110 * MIB + 490 * MIB)
    assert (before, allocated) == (0, after)
