"""bitsandbytes on fake cuda: states of optimizers, 8-bit and 4-bit layers, nothing left behind."""

from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from tests.processes import run_program
from tests.results import in_a_trace, on_fake_cuda

MIB = 1024 * 1024
BLOCKS = MIB // 256
MAPS = 2 * 256 * 4
bnb: Any = None


@pytest.fixture(autouse=True, scope="module")
def _imported_where_it_is_tested() -> None:
    """It takes two seconds, in each process that collects this file."""
    global bnb
    bnb = pytest.importorskip("bitsandbytes")


def states(name: str, elements: int = MIB, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    """Return what an optimizer keeps on the GPU for one parameter, and its state."""
    seen: dict[str, Any] = {}

    def program() -> None:
        parameter = nn.Parameter(torch.empty(elements, device="cuda"))
        optimizer = getattr(bnb.optim, name)([parameter], lr=1e-3, **kwargs)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        parameter.grad = torch.empty_like(parameter)
        for _ in range(2):
            optimizer.step()
        after = torch.cuda.memory_stats()["requested_bytes.all.current"]
        state = optimizer.state[parameter]
        seen.update({key: value.dtype for key, value in state.items() if torch.is_tensor(value)})
        seen["bytes"] = after - before - parameter.grad.nbytes

    profile = trace(program, device="cuda")
    assert not profile.unknown_workspaces
    assert not profile.warnings
    return seen.pop("bytes"), seen


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Adam8bit", 2 * MIB + 2 * BLOCKS * 4 + MAPS),
        ("AdamW8bit", 2 * MIB + 2 * BLOCKS * 4 + MAPS),
        ("PagedAdamW8bit", 2 * BLOCKS * 4 + MAPS),
        ("PagedAdamW32bit", 0),
        ("AdamW32bit", 8 * MIB),
        ("Lion8bit", MIB + BLOCKS * 4 + MAPS // 2),
        ("PagedLion", 0),
        ("RMSprop8bit", MIB + BLOCKS * 4 + MAPS // 2),
        ("AdEMAMix8bit", 3 * MIB + 3 * BLOCKS * 4 + MAPS),
    ],
)
def test_optimizers_keep_what_they_keep_on_a_gpu(name: str, kept: int) -> None:
    assert states(name)[0] == kept


def test_small_parameters_keep_states_of_32_bits() -> None:
    kept, dtypes = states("AdamW8bit", elements=4095)
    assert (kept, dtypes) == (2 * 4 * 4095, {"state1": torch.float, "state2": torch.float})


@in_a_trace("cuda")
def test_what_is_to_be_optimized_in_32_bits_is() -> None:
    embedding = bnb.nn.StableEmbedding(1000, 64).cuda()
    optimizer = bnb.optim.Adam8bit(embedding.parameters())
    embedding(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer.state[embedding.weight]["state1"].dtype == torch.float


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_layer_is_quantized_when_it_is_moved(kind: str, double: bool) -> None:
    rows, columns, block = 4096, 1024, 64
    blocks = rows * columns // block
    scales = blocks + blocks // 256 * 4 + 4 if double else blocks * 4
    kept: list[int] = []

    def program() -> None:
        layer = bnb.nn.Linear4bit(
            columns,
            rows,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type=kind,
            compress_statistics=double,
        )
        layer = layer.to("cuda")
        kept.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
        x = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        assert layer.weight.shape == (rows * columns // 2, 1)
        assert layer.weight.quant_state.nested is double

    profile = trace(program, device="cuda")
    codes = 16 * 4 + 2 * 256 * 4 * double  # of the scales one for the layer, one for the process
    assert kept[0] == rows * columns // 2 + scales + codes
    # The weight is dequantized for the gradient of the input.
    assert profile.backward_peak > kept[0] + rows * columns * 2
    assert profile.unknown_workspaces == ()


def test_the_kernel_of_a_4_bit_layer_is_chosen_for_the_gpu() -> None:
    """bitsandbytes/backends/cuda/ops.py, ``_gemm_4bit_use_custom_cuda``, for M of 64."""
    pytest.importorskip("bitsandbytes", "0.50")  # gemm_4bit

    def taken() -> int:
        layer = bnb.nn.Linear4bit(4096, 4096, bias=False, compute_dtype=torch.half).to("cuda")
        x = torch.empty(64, 4096, device="cuda", dtype=torch.half)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        with torch.no_grad():
            layer(x)
        return torch.cuda.max_memory_allocated() - before

    first, other, again = (on_fake_cuda(taken, gpu=gpu) for gpu in ("t4", "h100", "t4"))
    output, weight = 64 * 4096 * 2, 4096 * 4096 * 2
    assert first == again == output  # one kernel reads the quantized weight
    assert other >= output + weight  # the weight is dequantized for cuBLAS


def test_an_8_bit_layer() -> None:
    shapes: list[Any] = []

    def program() -> None:
        layer = bnb.nn.Linear8bitLt(256, 512, has_fp16_weights=False, threshold=6.0).cuda()
        x = torch.randn(32, 256, device="cuda", dtype=torch.half, requires_grad=True)
        layer(x).sum().backward()
        shapes.append((layer.state.CB.shape, layer.state.CB.dtype, layer.state.SCB.shape))

    profile = trace(program, device="cuda", values="none")
    assert shapes == [((512, 256), torch.int8, (512,))]
    assert "the result is False" in profile.warnings[0]  # no outlier is assumed


def test_layers_and_optimizers_have_the_values_that_they_have_on_the_cpu() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=1.0)
        model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 4)).to(device)
        parameters = [one for one in model.parameters() if one.is_floating_point()]
        optimizer = bnb.optim.Adam8bit(parameters, lr=1e-2, min_8bit_size=16)
        x, found = torch.linspace(-1, 1, 512).view(8, 64).to(device), []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    traced: list[float] = []
    profile = trace(lambda: traced.extend(losses("cuda")), device="cuda")
    assert not any("value" in warning for warning in profile.warnings)
    assert traced == pytest.approx(losses("cpu"), rel=1e-2)  # the layer rounds to 8 bits
    assert traced[2] < traced[0]


def test_nothing_of_a_trace_stays_in_the_library() -> None:
    def program() -> None:
        bnb.nn.Linear4bit(64, 64, compress_statistics=True).to("cuda")
        bnb.optim.PagedAdamW8bit([nn.Parameter(torch.empty(MIB, device="cuda"))])

    functional = bnb.functional
    before = (functional.lib, functional.get_paged, dict(functional.name2qmap))
    first = trace(program, device="cuda").figures()
    assert trace(program, device="cuda").figures() == first
    assert (functional.lib, functional.get_paged, dict(functional.name2qmap)) == before
    quantized, state = functional.quantize_blockwise(torch.linspace(-1, 1, 1000))
    error = functional.dequantize_blockwise(quantized, state) - torch.linspace(-1, 1, 1000)
    assert error.abs().max() < 0.02  # for real, with a map that holds numbers


_IMPORTED_IN_THE_TRACE = """
import sys
import torch
from pytest_torchmem import trace

def body():
    import bitsandbytes as bnb
    parameter = torch.nn.Parameter(torch.randn(65536, device="cuda"))
    optimizer = bnb.optim.Adam8bit([parameter])
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()

assert "bitsandbytes" not in sys.modules
first = trace(body, device="cuda").figures()
assert first == trace(body, device="cuda").figures()
import bitsandbytes
assert bitsandbytes.cextension.BNB_BACKEND == "CPU" or torch.cuda.is_available()
"""


def test_it_may_be_imported_in_the_trace() -> None:
    run_program(_IMPORTED_IN_THE_TRACE)
