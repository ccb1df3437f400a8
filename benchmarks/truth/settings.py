"""The settings that each model is recorded in, and its step: the same on a GPU as in a trace."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.truth.networks import NETWORKS, Network


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model runs."""

    name: str
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    channels_last: bool = False
    train: bool = True


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("float32"),
        Setting("autocast", autocast=True),
        Setting("bfloat16", torch.bfloat16),
        Setting("autocast-channels-last", autocast=True, channels_last=True),
        Setting("float32-eval", train=False),
        Setting("bfloat16-eval", torch.bfloat16, train=False),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model in a setting."""

    network: Network
    setting: Setting

    @property
    def key(self) -> str:
        """The case's name: family, model, setting."""
        return f"{self.network.name}/{self.setting.name}"


def cases() -> list[Case]:
    """Return all cases, one setting of all models after the other, where it makes a difference."""
    return [
        Case(network, setting)
        for setting in SETTINGS.values()
        for network in NETWORKS.values()
        if not setting.channels_last
        or (network.family in ("cnn", "diffusion") and "conv" not in network.name)
    ]


class Autocast(nn.Module):
    """A model under autocast on the device of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            return self.model(*inputs)


class Inference(nn.Module):
    """A model that remembers nothing for a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self.model(*inputs)


def build_model(case: Case, tiny: bool) -> nn.Module:
    """Return the model on the default device (``with torch.device(...)``), in its setting."""
    setting = case.setting
    model = case.network.make(**case.network.sizes(tiny))
    model = model.to(setting.dtype).train(setting.train)
    if setting.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if setting.autocast:
        model = Autocast(model)
    return model if setting.train else Inference(model)


def build_inputs(case: Case, tiny: bool) -> tuple[Tensor, ...]:
    """Return what the model is called with, on the default device."""
    setting = case.setting
    found = []
    for tensor in case.network.inputs(**case.network.sizes(tiny)):
        if tensor.is_floating_point():
            tensor = tensor.to(setting.dtype)
        if setting.channels_last and tensor.dim() == 4:
            tensor = tensor.to(memory_format=torch.channels_last)
        found.append(tensor)
    return tuple(found)


def loss_of(output: Tensor) -> Tensor:
    """Return the mean of what a model returns, in float32."""
    return output.float().mean()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every case."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def run_step(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    optimizer: torch.optim.Optimizer | None,
    mark: Callable[[str], None],
) -> None:
    """Run one step; ``mark`` is told the name of every phase that has ended.

    What a name keeps alive is part of the result: as in ``pytest_torchmem.trace``, output and loss
    live until the step ends. Without an optimizer it is the forward alone.
    """
    output = model(*inputs)
    if optimizer is None:
        mark("forward")
        return
    loss = loss_of(output)
    mark("forward")
    loss.backward()
    mark("backward")
    optimizer.step()
    mark("optimizer")
