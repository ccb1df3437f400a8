"""How workspaces of CUDA kernels are booked: where, for how long, and how sure."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, linalg, nn

from pytest_torchmem import MemoryProfile, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.operators.cuda_programs import PROGRAMS, read_requests, requests

MIB = 2**20
CUBLAS = 4096 * 1024 * 2 + 16 * 1024 * 8


def cuda(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """Return a tensor on the GPU."""
    return torch.ones(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def workspaces(profile: MemoryProfile) -> list[Allocation]:
    """Return all workspaces of a profile, in order."""
    return [one for one in profile.timeline.allocations if one.kind is Kind.WORKSPACE]


# -- cuBLAS ----------------------------------------------------------------------------------------


def kept(profile: MemoryProfile) -> list[int]:
    """Return the workspaces that stay."""
    return [one.nbytes for one in workspaces(profile) if one.label]


def step() -> None:
    """Two products forward and their gradients."""
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


# -- where they are booked -------------------------------------------------------------------------


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
    x = torch.ones(64, 128, 32)
    first, by_step = (
        trace(layer, x, device="cuda", gpu="a100", loss_fn=lambda out: out[0].sum())
        for layer in layers
    )
    names = ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
    assert first.peak > by_step.peak

    def copies(profile: MemoryProfile) -> list[int]:
        taken = [one.nbytes for one in workspaces(profile) if one.origin.operator in names]
        return [nbytes for nbytes in taken if nbytes < 8 * 1024**2]  # else it is cuDNN's

    source, gradient, state = x.numel() * 4, 64 * 128 * 16 * 4, 64 * 16 * 4
    assert copies(first) == [source, state, state, source, gradient, source]
    assert copies(by_step) == [2 * state, 2 * state, gradient]  # twice the batch


# -- in the order of their kernels -----------------------------------------------------------------


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


# -- unknown ---------------------------------------------------------------------------------------


def test_an_operator_without_a_function_is_unknown() -> None:
    profile = trace(lambda: torch.fft.fft(cuda(8)), device="cuda", gpu="a100")
    assert profile.unknown_workspaces == ("aten::_fft_r2c",)
    assert "aten::_fft_r2c is unknown" in profile.warnings[0]


# -- the same everywhere ---------------------------------------------------------------------------


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


def test_what_cusolver_takes_is_not_known() -> None:
    def body() -> None:
        linalg.lstsq(torch.ones(64, 32, device="cuda"), torch.ones(64, 8, device="cuda"))

    assert trace(body, device="cuda").unknown_workspaces == ("aten::linalg_lstsq",)


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
def test_numbers_of_four_bits(inner: int, rows: int, width: int, group: int) -> None:
    def program() -> None:
        numbers = torch.randint(0, 16, (rows, width), device="cuda")
        weight = ((numbers[:, ::2] << 4) | numbers[:, 1::2]).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(weight, inner)
        tile, lane = rows // 8 - 1, 13
        assert packed[tile, -1, lane, 0] == packed_by_lane(
            weight, tile, packed.shape[1] - 1, lane, inner
        )
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

    trace(program, device="cuda")
