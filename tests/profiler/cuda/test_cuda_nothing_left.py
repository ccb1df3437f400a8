"""After a trace on fake cuda, however it ended, torch is as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nvtx
import torch.serialization
import torch.utils._device
from torch import nn

from pytest_torchmem import trace

_HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key
_KEYS = ("Fake", "AutocastIPU", "AutogradCPU")


def places() -> dict[str, dict[str, Any]]:
    """Return the attributes of every class and module that a trace could replace."""
    owners: dict[str, Any] = {
        "Tensor": torch.Tensor,
        "Parameter": nn.Parameter,
        "Module": nn.Module,
        "UntypedStorage": torch.UntypedStorage,
        "HigherOrderOperator": torch._ops.HigherOrderOperator,
        "DeviceContext": torch.utils._device.DeviceContext,
        "torch": torch,
        "_C": torch._C,
        "_nn": torch._C._nn,
        "cuda": torch.cuda,
        "cuda.memory": torch.cuda.memory,
        "cuda.random": torch.cuda.random,
        "cuda.streams": torch.cuda.streams,
        "cuda.nvtx": torch.cuda.nvtx,
        "cudnn": torch.backends.cudnn,
        "cudnn.rnn": torch.backends.cudnn.rnn,
        "accelerator": torch.accelerator,
        "accelerator.memory": torch.accelerator.memory,
        "serialization": torch.serialization,
        "random": torch.random,
    }
    return {name: dict(vars(owner)) for name, owner in owners.items()}


def registrations() -> set[tuple[str, str]]:
    """Return every operator that has a kernel for a key that a trace uses."""
    return {
        (name, key)
        for name in torch._C._dispatch_get_all_op_names()
        for key in _KEYS
        if _HAS_KERNEL(name, key)
    }


def thread_state() -> list[Any]:
    """Return what of the dispatcher, autocast and the generators belongs to this thread."""
    keys = [torch._C._parse_dispatch_key(name) for name in ("Fake", "AutocastIPU", "AutocastCUDA")]
    return [
        [torch._C._dispatch_tls_is_dispatch_key_included(key) for key in keys],
        [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys],
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        torch._C._len_torch_dispatch_stack(),
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.cuda.is_initialized(),
        torch.cuda.is_available(),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        torch.ones(2, requires_grad=True).device,
    ]


def whole_step() -> None:
    """Touch every layer of a trace: identity, dispatch, autocast, recurrent layers, optimizer."""
    torch.set_default_device("cuda")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    layer = nn.LSTM(4, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *layer.parameters()])
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda"):
        loss = model(torch.ones(2, 3, 8, 8)).float().sum() + layer(torch.ones(3, 2, 4))[0].sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    torch.cuda.Stream().synchronize()


def end_normally() -> None:
    """Return."""


def end_with_an_error() -> None:
    raise ValueError("of the program")


def end_with_an_interrupt() -> None:
    raise KeyboardInterrupt


def end_inside_of_a_region() -> None:
    torch.autocast("cuda").__enter__()
    raise ValueError("of the program")


@pytest.mark.parametrize(
    "ending", [end_normally, end_with_an_error, end_with_an_interrupt, end_inside_of_a_region]
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_torch_is_as_it_was(ending: Callable[[], None], in_thread: bool) -> None:
    trace(lambda: None, device="cuda")  # what is imported and learned once
    torch.ones(1).device  # noqa: B018
    before = (places(), registrations(), thread_state())

    def program() -> None:
        whole_step()
        ending()

    def run() -> None:
        try:
            trace(program, device="cuda")
        except (ValueError, KeyboardInterrupt) as error:
            ended.append(type(error))

    ended: list[type] = []
    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    after = (places(), registrations(), thread_state())
    assert bool(ended) == (ending is not end_normally)
    for name, attributes in before[0].items():
        changed = {
            key
            for key in attributes.keys() | after[0][name].keys()
            if attributes.get(key, "absent") is not after[0][name].get(key, "absent")
        }
        assert changed <= {"__warningregistry__", "__annotations__", "_dynamo", "compiler"}, name
    assert after[1] == before[1]
    assert after[2] == before[2]


def test_other_threads_see_torch_as_it_is() -> None:
    seen: list[Any] = []

    def other() -> None:
        x = torch.ones(2, 2, requires_grad=True)
        output = nn.functional.dropout(nn.functional.softmax(x, -1), 0.5)
        output.sum().backward()
        seen.extend([x.device.type, torch.cuda.is_available(), output.data_ptr() != 0])
        seen.append(x.grad is not None and bool(x.grad.isfinite().all()))

    def program() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    available = torch.cuda.is_available()
    trace(program, device="cuda")
    assert seen == ["cpu", available, True, True]
