"""Workspaces of CUDA kernels: their formulas; where they are booked, how long and how sure."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, linalg, nn

from pytest_torchmem import MemoryProfile, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.attention.fused import Shape, efficient_backward_bytes, flash_splits
from pytest_torchmem.operators.elementwise import sum_buffers
from pytest_torchmem.operators.libraries.nvidia import blas_buffer
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.operators.workspace import Workspace, as_workspace
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind
from pytest_torchmem.targets.gpus import Gpu, find_gpu, gpu_names
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.asked import workspace_of
from tests.operators.cuda_programs import PROGRAMS, read_requests, requests
from tests.results import cuda, in_a_trace

MIB = 2**20
CUBLAS = 4096 * 1024 * 2 + 16 * 1024 * 8


def workspaces(profile: MemoryProfile) -> list[Allocation]:
    return [one for one in profile.timeline.allocations if one.kind is Kind.WORKSPACE]


def kept(profile: MemoryProfile) -> list[int]:
    return [one.nbytes for one in workspaces(profile) if one.label]


def step() -> None:
    x = cuda(8, 8)
    ((x @ x) @ x).sum().backward()


@pytest.mark.parametrize(
    ("gpu", "nbytes"),
    [("t4", CUBLAS), ("a100", CUBLAS), ("rtx-4090", CUBLAS)]
    + [(name, 32 * MIB) for name in ("h100", "h200", "b200", "rtx-5090")],
)
def test_cublas_takes_its_workspace_once_for_the_program_and_once_for_the_engine(gpu, nbytes):
    """CublasHandlePool.cpp: ``cublas_stream_to_workspace`` is ``thread_local``."""
    first, second = (trace(step, device="cuda", gpu=gpu) for _ in range(2))
    assert kept(first) == kept(second) == [nbytes, nbytes]
    assert first.end == second.end == 2 * nbytes


def test_the_engine_has_a_workspace_of_its_own_for_its_threads_alone() -> None:
    assert kept(trace(lambda: cuda(8, 8) @ cuda(8, 8), device="cuda", gpu="a100")) == [CUBLAS]
    # torch/csrc/autograd/engine.cpp, ``Engine::ready_queue``.
    with torch.autograd.set_multithreading_enabled(False):
        assert kept(trace(step, device="cuda", gpu="a100")) == [CUBLAS]


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [(":4096:8", 4096 * 1024 * 8), (":16:8", 16 * 1024 * 8), ("nonsense", CUBLAS), (":0:0", 0)],
)
def test_cublas_workspace_config(config: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert kept(trace(step, device="cuda", gpu="a100")) == ([nbytes, nbytes] if nbytes else [])


def test_cublaslt_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """``parseCUDABlasLtWorkspaceSize``: 1 MiB where it shares nothing with cuBLAS."""
    layer = nn.Linear(8, 8)
    shared = trace(layer, torch.ones(2, 8), device="cuda", gpu="a100", backward=False)
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    apart = trace(layer, torch.ones(2, 8), device="cuda", gpu="a100", backward=False)
    assert (kept(shared), kept(apart)) == ([CUBLAS], [MIB])
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "²")  # a digit, and no number
    assert kept(trace(layer, torch.ones(2, 8), device="cuda", gpu="a100", backward=False)) == [MIB]


@pytest.mark.parametrize("config", [":99999999999999999999:8", ":4096:" + "9" * 5000])
def test_workspaces_that_no_memory_has(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    with pytest.raises(UsageError, match=r"variable CUBLAS_WORKSPACE_CONFIG is .*too large"):
        trace(step, device="cuda", gpu="a100")


def test_nothing_of_it_on_the_cpu() -> None:
    profile = trace(nn.Sequential(nn.Linear(8, 8), nn.LogSoftmax(-1)), torch.ones(2, 8))
    assert not kept(profile)
    assert not profile.unknown_workspaces


def test_what_is_known_of_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    profile = trace(model, torch.ones(2, 3, 16, 16), device="cuda", gpu="a100")
    assert profile.unknown_workspaces == ("aten::convolution", "aten::convolution_backward")
    assert "aten::convolution" in profile.warnings[-1]
    model = nn.Conv1d(8, 8, 3, groups=8)
    assert not trace(model, torch.ones(2, 8, 16), device="cuda").unknown_workspaces

    def body() -> None:
        x = cuda(2, 4, 10, 10).to(memory_format=torch.channels_last)
        functional.conv2d(x, cuda(8, 4, 3, 3))

    profile = trace(body, device="cuda", gpu="a100")
    assert profile.by_confidence() == {"unknown": 8 * 4 * 3 * 3 * 4}


@pytest.mark.parametrize(
    ("dtype", "memory_format", "known"),
    [
        (torch.float32, torch.contiguous_format, True),
        (torch.bfloat16, torch.contiguous_format, True),
        (torch.float16, torch.contiguous_format, False),
        (torch.float32, torch.channels_last, False),
    ],
)
def test_depthwise_convolutions_through_aten_are_known(dtype, memory_format, known):
    """Convolution.cpp, ``use_cudnn_depthwise``."""
    model = nn.Conv2d(32, 32, 3, groups=32, dtype=dtype)
    x = torch.ones(2, 32, 16, 16, dtype=dtype).to(memory_format=memory_format)
    assert bool(trace(model, x, device="cuda", gpu="a100").unknown_workspaces) != known


def test_of_batch_norm_the_reserve_has_a_bound() -> None:
    """A bit for each element of what is channels last; and in evaluation there is none."""
    model, x = nn.BatchNorm2d(8), torch.ones(2, 8, 32, 32)
    last = x.to(memory_format=torch.channels_last)
    retained = [trace(model, input, device="cuda", gpu="a100").retained for input in (x, last)]
    assert retained[1] - retained[0] == x.numel() // 8
    made = trace(model, last, device="cuda", gpu="a100").timeline.allocations
    sizes = [one.nbytes for one in made if one.origin.operator == "aten::cudnn_batch_norm"]
    assert sizes[:4] == [4 * x.numel(), x.numel() // 8, 4 * 8, 4 * 8]  # BatchNorm.cpp's order
    profile = trace(model.eval(), last, device="cuda", gpu="a100", backward=False)
    assert profile.by_confidence() == {}


def test_of_recurrent_layers_the_copies_step_by_step_are_known() -> None:
    """RNN.cpp, ``_cudnn_rnn``: with ``batch_first`` the input is transposed and made dense."""
    layers = [nn.LSTM(32, 16, batch_first=first) for first in (True, False)]
    x, options = torch.ones(64, 128, 32), {"device": "cuda", "gpu": "a100"}
    options["loss_fn"] = lambda out: out[0].sum()
    first, by_step = (trace(layer, x, **options) for layer in layers)
    names = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    assert first.peak > by_step.peak

    def copies(profile: MemoryProfile) -> list[int]:
        taken = [one.nbytes for one in workspaces(profile) if one.origin.operator in names]
        return [nbytes for nbytes in taken if nbytes < 8 * 1024**2]  # else it is cuDNN's

    source, gradient, state = x.numel() * 4, 64 * 128 * 16 * 4, 64 * 16 * 4
    assert copies(first) == [source, state, state, source, gradient, source]
    assert copies(by_step) == [2 * state, 2 * state, gradient]  # twice the batch


@pytest.mark.skipif(TORCH_VERSION[:2] != (2, 13), reason="recorded with torch 2.13")
@pytest.mark.parametrize("name", PROGRAMS)
def test_requests_are_those_of_torchs_own_cuda_code(name: str, chance: random.Random) -> None:
    """On an A100, on another GPU, drawn anew in every run, and once more by plans remembered."""
    recorded = {gpu: found[name] for gpu, found in read_requests().items() if name in found}
    others = [gpu for gpu in recorded if gpu != "a100-80gb"]
    drawn = random.Random(f"{chance.random()} {name}").choice(others)
    for gpu in ("a100-80gb", drawn, drawn):
        print(gpu)
        profile = trace(PROGRAMS[name], device="cuda", gpu=gpu, memory="unlimited")
        pairs = [*zip(requests(profile), recorded[gpu], strict=True)]
        apart = [(traced, real) for traced, real in pairs if traced != real]
        bounds = {one.nbytes for one in workspaces(profile) if one.confidence is Confidence.BOUNDED}
        assert all(abs(real) < abs(traced) in bounds for traced, real in apart), apart


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda: torch.fft.fft(cuda(8)), "aten::_fft_r2c"),
        (lambda: linalg.eig(cuda(3, 3)), "aten::linalg_eig"),
        (lambda: linalg.lstsq(cuda(64, 32), cuda(64, 8)), "aten::linalg_lstsq"),
    ],
)
def test_what_only_a_library_tells_is_unknown(run: Callable[[], Any], operator: str) -> None:
    profile = trace(run, device="cuda", gpu="a100")
    assert profile.unknown_workspaces == (operator,)
    assert f"{operator} is unknown" in profile.warnings[0]


def test_bytes_do_not_depend_on_the_machine_that_traces() -> None:
    model, x = nn.TransformerEncoderLayer(64, 8, 64), torch.ones(2, 256, 64)
    threads = torch.get_num_threads()
    first = trace(model, x, device="cuda", gpu="l4")
    try:
        torch.set_num_threads(3)
        second = trace(model, x, device="cuda", gpu="l4")
    finally:
        torch.set_num_threads(threads)
    assert first.figures() == second.figures()
    assert first.timeline == second.timeline


Solves = Callable[[Tensor, Tensor], Tensor]
# Small requests come in another order than in torch's CUDA code, so these are peaks of that
# (2.13.0+cu130, as an A100, without a GPU). What cuSOLVER asks for itself counts as nothing.
LIBRARIES: dict[str, tuple[Solves, tuple[int, ...], tuple[int, ...], int, int]] = {
    "solve large": (linalg.solve, (4, 300, 300), (4, 300, 8), 11_541_296, 22_919_368),
    "determinant": (lambda a, b: linalg.slogdet(a)[1], (16, 64, 64), (1,), 9_057_860, 18_371_468),
    "least squares": (lambda a, b: linalg.lstsq(a, b)[0], (64, 32), (64, 8), 8_540_308, 17_186_824),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_peaks(name: str) -> None:
    program, first, second, forward, backward = LIBRARIES[name]
    model = nn.Module()
    model.forward = program
    a, b = (torch.randn(shape, requires_grad=True) for shape in (first, second))
    profile = trace(model, a, b, device="cuda", gpu="a100-80gb")
    assert (profile.forward_peak, profile.backward_peak) == (forward, backward)


def packed_by_lane(weight: Tensor, tile: int, several: int, lane: int, inner: int) -> int:
    """Return the first number of a lane, as native/cuda/int4mm.cu has it in
    ``matrix_to_m16n8k16_Bint4_layout``.
    """
    first = several * inner * 8
    places = [first + lane % 4, first + lane % 4 + 4, first + 8 + lane % 4, first + 12 + lane % 4]
    row = tile * 8 + lane // 4
    halves = [int(weight[row, place]) for place in places] if row < len(weight) else [0] * 4
    bits = sum((byte & 15) << (16 + 4 * place) for place, byte in enumerate(halves))
    bits += sum((byte >> 4) << (4 * place) for place, byte in enumerate(halves))
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@pytest.mark.parametrize(
    ("inner", "rows", "width", "group"), [(2, 24, 64, 32), (4, 16, 128, 64), (8, 8, 256, 128)]
)
@in_a_trace("cuda")
def test_numbers_of_four_bits(inner: int, rows: int, width: int, group: int) -> None:
    numbers = torch.randint(0, 16, (rows, width), device="cuda")
    weight = ((numbers[:, ::2] << 4) | numbers[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(weight, inner)
    tile, lane = rows // 8 - 1, 13
    expected = packed_by_lane(weight, tile, packed.shape[1] - 1, lane, inner)
    assert packed[tile, -1, lane, 0] == expected
    scales = torch.randn(width // group, rows, 2, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(5, width, dtype=torch.bfloat16, device="cuda")
    scale, zero = scales.float().repeat_interleave(group, 0).unbind(-1)
    expected = x @ ((numbers - 8) * scale.t() + zero.t()).bfloat16().t()
    before = torch.cuda.memory_allocated()
    y = torch._weight_int4pack_mm(x, packed, group, scales)
    assert torch.cuda.memory_allocated() - before == max(y.nbytes, 512)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="kBFloat16"):
        torch._weight_int4pack_mm(x.float(), packed, group, scales)


FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
EXACT, BOUNDED, UNKNOWN = Confidence.EXACT, Confidence.BOUNDED, Confidence.UNKNOWN
A100, H100 = find_gpu("a100"), find_gpu("h100")


def meta(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def found(operator: str, outputs: Any, *args: Any, gpu: Gpu = A100, **kwargs: Any) -> Workspace:
    return workspace_of(operator, gpu, outputs, *args, **kwargs)


def bytes_of(workspace: Workspace) -> tuple[int, ...]:
    """Return the requests of a workspace beside the outputs."""
    return tuple(one for one in workspace.requests if isinstance(one, int) and one)


def test_where_shared_memory_decides_the_larger_kernel_is_a_limit() -> None:
    """128 queries and keys in registers, or 64 of each and the keys' gradients in memory."""
    shape = (2, 8, 512, 512)
    limit = efficient_backward_bytes(find_gpu("rtx-5090"), HALF, Shape(*shape, 128, 128))
    keys, queries = 2 * 512 * 128, (128 // 64) * (512 // 64) * (4 + 64 * 64)
    assert (limit.confidence, bytes_of(limit)) == (BOUNDED, (4 * 16 * 512, 64 * (keys + queries)))


def test_volta_sums_the_rows_of_large_heads_before() -> None:
    """``kKernelComputesDelta``: two casts to float, their product, its sum, and that dense."""
    shape, sums = (8, 32, 1024, 1024), 4 * 8 * 32 * 1024
    large = efficient_backward_bytes(find_gpu("v100"), HALF, Shape(*shape, 256, 256))
    assert bytes_of(large)[:3] == (3 * sums * 256, sums, sums)


def test_products_of_groups_and_scaled_ones() -> None:
    """GroupedBlas.cpp, ``_grouped_mm_cuda``."""
    x, weights = meta(64, 32, dtype=BFLOAT), meta(4, 32, 16, dtype=BFLOAT)
    assert found("_grouped_mm", None, x, weights, gpu=H100).confidence is UNKNOWN
    assert found("_grouped_mm", None, x, weights).kept == (blas_buffer(A100),)
    # ScaledBlas.cpp: cuBLASLt with a scale for each matrix, CUTLASS with one for each row.
    x = meta(64, 32, dtype=torch.float8_e4m3fn)
    tensor = found("_scaled_mm", None, x, x.t(), meta(1), meta(1), gpu=H100)
    rows = found("_scaled_mm", None, x, x.t(), meta(64, 1), meta(1, 64), gpu=H100)
    assert (tensor.confidence, rows.confidence) == (EXACT, UNKNOWN)
    assert tensor.kept == rows.kept == (blas_buffer(H100),)


shapes = st.lists(st.sampled_from([1, 2, 3, 8, 33, 128, 1000, 4096]), min_size=1, max_size=4)
names, dtypes = st.sampled_from(gpu_names()), st.sampled_from([FLOAT, BFLOAT, torch.float64])


@given(names, shapes, st.data(), dtypes)
def test_reductions_take_what_their_blocks_can_use(name, shape, data, dtype):
    assume(math.prod(shape) < 2**36)
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    gpu = find_gpu(name)
    buffers = sum_buffers(gpu, shape, sorted(dims), dtype)
    assert buffers == sum_buffers(gpu, shape, sorted(dims, reverse=True), dtype)
    if buffers and math.prod(shape) < 2**28:
        assert all(size > 0 for size in buffers)
        partial, semaphores = buffers
        inputs = math.prod(shape[dim] for dim in dims)
        outputs = math.prod(shape) // inputs
        accumulator = max(4, dtype.itemsize)
        assert semaphores % 4 == 0
        assert semaphores <= 4 * outputs
        assert partial % (accumulator * outputs) == 0
        # A block adds up 16 values of a thread at least, and outputs have room for 512 threads.
        assert partial <= accumulator * outputs * 512 * -(-inputs // 16)


few, many = st.integers(1, 32), st.integers(1, 3000)


@given(names, st.integers(1, 8), few, many, many, few)
def test_attention_takes_no_negative_bytes_and_more_for_more(
    name, batch, heads, queries, keys, size
):
    gpu, size = find_gpu(name), 8 * size
    splits = flash_splits(gpu, batch, queries, keys, heads, size)
    assert 1 <= splits <= min(128, 2 * gpu.multiprocessors)
    for dtype in (HALF, FLOAT):
        one, twice = (
            efficient_backward_bytes(gpu, dtype, Shape(batch, heads, rows, keys, size, size))
            for rows in (queries, 2 * queries)
        )
        assert 0 < one.nbytes <= twice.nbytes


def test_unknown_is_only_what_no_source_tells() -> None:
    query = meta(2, 4, 64, 64, dtype=BFLOAT)
    assert found("_scaled_dot_product_cudnn_attention", [None], query).confidence is UNKNOWN


class Silent:
    def ask(self, question: object) -> None:
        """Return no workspace."""


def test_a_gradient_of_attention_is_copied_where_it_lies_otherwise() -> None:
    """MHA.cpp, ``same_strides``: those of dimensions of size 1 do not count."""
    query = meta(1, 4, 64, 64, dtype=BFLOAT)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    function = spec_of(operator).on("cuda").workspace
    assert function is not None

    def copied(gradient: Tensor) -> int:
        rest = (query, query, query, query, meta(1, 4, 64, 1), *[meta(0)] * 2, *[None] * 3)
        given = (gradient, *rest, 64, 64, 0.0, False)
        taken = function(given, {}, machine=H100, outputs=None, cudnn=Silent())
        return sum(as_workspace(taken, "").requests)

    assert copied(query) == copied(query.as_strided(query.shape, (7, *query.stride()[1:]))) == 0
    assert copied(query.transpose(1, 2).contiguous().transpose(1, 2)) == query.numel() * 2


@pytest.mark.parametrize(("channels", "told"), [(64, 221_668), (256, 201_544), (2048, 655_488)])
def test_batch_norm_of_cudnn_has_a_bound(channels: int, told: int) -> None:
    """Of the plans that cuDNN 9.20 lists for a batch norm on an A100, the largest workspace."""
    x = meta(32, channels, 14, 14, dtype=torch.float16)
    weight = meta(channels)
    assert found("cudnn_batch_norm", None, x, weight, None, None, None, True).requests == ()
    last = x.to(memory_format=torch.channels_last)
    taken = found("cudnn_batch_norm", None, last, weight, None, None, None, True)
    assert taken.confidence is BOUNDED
    assert told <= sum(taken.requests) <= max(5 * told, MIB)


def test_the_loss_of_sequences_of_cudnn_has_a_bound() -> None:
    """More than warp-ctc's, whose interface it has: a table, probabilities and sums."""
    steps, batch, labels, longest = 50, 4, 20, 10
    arguments = (meta(steps, batch, labels), meta(40), [50] * 4, [longest, 3, 2, 1], 0, True, False)
    taken = found("_cudnn_ctc_loss", None, *arguments)
    assert taken.confidence is BOUNDED
    assert sum(taken.requests) > 4 * batch * steps * (2 * longest + 1 + labels + 1)


def test_a_long_slice_is_sorted_in_a_copy_to_find_its_mode() -> None:
    """The sort is what torch 2.13.0's CUDA code asks an A100 for, without a GPU."""
    n, outputs = 1_000_000, (meta(2), meta(2))
    long = found("mode", outputs, meta(2, n))
    each = (8 * n, 12_342_527, -12_342_527, -8 * n)
    assert long == Workspace((2 * n * 4, *each, *each), BOUNDED)
    truths = found("mode", outputs, meta(2, 20_000, dtype=torch.bool))
    each = (34_823, -34_823, 69_391, -69_391)
    assert truths == Workspace((40_000, *each, *each))
    assert found("mode", (meta(4), meta(4)), meta(5000, 4), 0).requests[0] == 4 * 5000 * 4
    assert found("mode", (meta(4), meta(4)), meta(4, 2000)).requests in ((), (0,))
