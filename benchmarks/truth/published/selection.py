"""Forwards in which a part of the parameters gets gradients, as others measured them.

``plutonium-239/memsave_torch``, experiments/util/measurements.py, ``MemoryMeasurement``: the peak
of what is allocated in one forward with its loss, in float32 but for Mistral. Which parameters get
gradients is a case: *All* but embeddings; those of *Norm* layers; none, but the *Input* does, also
with batch norms in evaluation. The case *Surgical*, the first quarter of all layers, depends on how
an earlier state of the repository counted them, and is left out.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.truth.published.programs import Program

_PRODUCTS = (nn.Linear, nn.Conv2d)


class Norm(nn.Module):
    """A norm that has a scale and no shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


_NORMS = (nn.BatchNorm2d, nn.LayerNorm, Norm)


def images(name: str, case: str, batch: int = 64, side: int = 224) -> Program:
    """Return a forward of one of torchvision's networks; they take 224 by 224 pixels."""

    def make() -> nn.Module:
        import torchvision

        network: nn.Module = getattr(torchvision.models, name)()
        return network

    return _forward(make, case, (batch, 3, side, side), (batch,), 1000)


def words(make: Callable[[], nn.Module], case: str, batch: int, width: int, most: int) -> Program:
    """Return a forward of a language model on 256 embedded words; ``most`` is its vocabulary."""
    return _forward(make, case, (batch, 256, width), (batch, 256), most)


def _forward(
    make: Callable[[], nn.Module],
    case: str,
    inputs: tuple[int, ...],
    targets: tuple[int, ...],
    classes: int,
) -> Program:
    def program() -> None:
        original = torch.rand(*inputs, device="cuda")
        right = torch.randint(0, classes, targets, device="cuda")
        model = make().to("cuda")
        x, y = _copied(original), _copied(right)
        select(model, case)
        x.requires_grad_(case.startswith("Input"))
        criterion = nn.CrossEntropyLoss().to("cuda")
        loss = criterion(model(x), y)
        del loss

    return program


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone().detach().to("cuda")


def select(model: nn.Module, case: str) -> None:
    """Let those parameters get gradients that do in a case; those of ``head`` in all of them.

    Raises ``ValueError`` for a case that is none.
    """
    if case not in ("All", "Norm", "Input", "Input (BN Eval)"):
        raise ValueError(f"{case!r} is no case")
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and "Eval" in case:
            module.eval()
        if name == "head":
            continue
        wanted = isinstance(module, _PRODUCTS) and case == "All"
        wanted = wanted or (isinstance(module, _NORMS) and case in ("All", "Norm"))
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(wanted)
