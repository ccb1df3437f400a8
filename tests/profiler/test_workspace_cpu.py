"""Workspaces of CPU kernels, against what the real allocator gives out on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from benchmarks.workspace_cpu import CLOSE, Call, Program, Recorder
from pytest_torchmem.profiler.devices.host import REFERENCE, this_machine
from pytest_torchmem.profiler.shapes_missing import META_FUNCTIONS, meta
from pytest_torchmem.profiler.workspace import find_workspace, workspace

onednn = pytest.mark.skipif(
    this_machine().capability != "AVX512" or not this_machine().onednn,
    reason="oneDNN's blocks are checked where its AVX512 kernels run",
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def image(*shape: int, dtype: torch.dtype = torch.float32, channels_last: bool = False):
    tensor = torch.randn(shape).to(dtype)
    if channels_last:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor.requires_grad_()


def calls_of(*programs: Program) -> list[Call]:
    recorder = Recorder()
    recorder.run(programs)
    assert not recorder.failed
    return recorder.calls


def assert_predicted(calls: list[Call], within: int = 0) -> None:
    host = this_machine()
    different = [
        f"{call}: {call.predicted(host)}, measured {call.measured}"
        for call in calls
        if abs(call.predicted(host) - call.measured) > within
    ]
    assert not different


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalization(threads: int, channels_last: bool) -> None:
    x = image(2, 16, 9, 9, channels_last=channels_last)
    weight, bias = image(16), image(16)
    assert_predicted(
        calls_of(
            lambda: F.batch_norm(x, None, None, weight, bias, True),
            lambda: F.group_norm(x, 4, weight, bias),
            lambda: F.layer_norm(x, (9,), image(9)),
        )
    )


@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_and_padding(threads: int, channels_last: bool) -> None:
    x = image(2, 3, 17, 18, channels_last=channels_last)
    assert_predicted(
        calls_of(
            lambda: F.max_pool2d(x, 3, 2, 1),
            lambda: F.avg_pool2d(x, 2),
            lambda: F.adaptive_avg_pool2d(x, (2, 5)),
            lambda: F.pad(x, (1, 2, 2, 1), mode="reflect"),
            lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
            lambda: F.interpolate(x, size=(90, 90), mode="bicubic"),
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reductions(threads: int, dtype: torch.dtype) -> None:
    x = image(8, 300, 17, dtype=dtype)
    assert_predicted(
        calls_of(
            lambda: x.sum(),
            lambda: x.sum((0, 2)),
            lambda: x.mean(1),
            lambda: x.logsumexp(0),
            lambda: x.detach().transpose(0, 2).argmax(),
            lambda: x.detach().bool().sum(1),
            lambda: F.softmax(x, 1),
            lambda: torch.sort(x, 1),
        )
    )


def test_types_are_promoted(threads: int) -> None:
    x = image(8, 30, 5)
    mask = torch.ones(8, 30, 5, dtype=torch.bool)
    assert_predicted(
        calls_of(lambda: x * mask, lambda: x + 2, lambda: x.detach().bfloat16().add_(x.detach()))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention(threads: int, dtype: torch.dtype) -> None:
    query, key, value = (image(1, 2, length, 32, dtype=dtype) for length in (300, 700, 700))
    calls = calls_of(lambda: F.scaled_dot_product_attention(query, key, value))
    assert {"aten::_scaled_dot_product_flash_attention_for_cpu"} <= {call.name for call in calls}
    assert_predicted(calls, within=CLOSE)


@onednn
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution_forward(threads: int, channels_last: bool) -> None:
    x = image(2, 17, 15, 17, channels_last=channels_last).detach()
    weight, bias = image(64, 17, 3, 3).detach(), image(64).detach()
    calls = calls_of(
        lambda: F.conv2d(x, weight, bias, padding=1), lambda: F.conv2d(x, weight, stride=2)
    )
    assert_predicted(calls, within=CLOSE)


@onednn
def test_convolution_backward(threads: int) -> None:
    x, weight, bias = image(2, 64, 15, 17), image(64, 64, 3, 3), image(64)
    assert_predicted(calls_of(lambda: F.conv2d(x, weight, bias, padding=1)), within=CLOSE)


@onednn
@pytest.mark.parametrize(("inputs", "hidden", "steps", "batch"), [(8, 16, 5, 3), (33, 20, 4, 5)])
def test_lstm(threads: int, inputs: int, hidden: int, steps: int, batch: int) -> None:
    layer = torch.nn.LSTM(inputs, hidden, 2)
    x = image(steps, batch, inputs)
    calls = calls_of(lambda: layer(x))
    assert_predicted(calls)
    for call in calls:
        if call.name == "aten::mkldnn_rnn_layer":
            expected = META_FUNCTIONS[call.name](*call.args)
            assert [tuple(output.shape) for output in expected] == [
                tuple(output.shape) for output in call.outputs
            ]


def test_nothing_is_taken_for_an_empty_tensor() -> None:
    convolution = find_workspace("aten::convolution", "cpu")
    assert convolution is not None
    empty = torch.empty(0, 3, 8, 8, device="meta")
    weight = torch.empty(16, 3, 3, 3, device="meta")
    result = torch.empty(0, 16, 6, 6, device="meta")
    taken = convolution(
        REFERENCE, result, empty, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    )
    assert taken == 0


def test_an_operator_has_one_function() -> None:
    with pytest.raises(ValueError, match="already"):
        workspace("aten::mm", device="cpu")(lambda: 0)
    with pytest.raises(ValueError, match="already"):
        meta("aten::geqrf")(lambda: None)


def test_a_reduced_loss_keeps_the_storage_of_all_elements() -> None:
    x, y = torch.randn(8, 30), torch.randn(8, 30)
    real = F.mse_loss(x, y)
    made = META_FUNCTIONS["aten::mse_loss"](x.to("meta"), y.to("meta"))
    assert made.shape == real.shape
    assert made.untyped_storage().nbytes() == real.untyped_storage().nbytes() == 8 * 30 * 4
