"""Questions to cuDNN and its answers: the same text in files and between processes.

A question names no GPU and no version; these stand beside it where answers are kept. Its tensors
are those that ATen hands to cuDNN, with the strides that cuDNN sees::

    cudnn::convolution_forward
    float16[32,64,56,56], float16[64,64,3,3], float16[32,64,56,56], [1,1], [1,1], [1,1]
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

DIRECTIONS = ("forward", "backward_input", "backward_weight")
PREFIX = "cudnn::"
ALIGNED = 32
"""Bytes; what ``getAlignment`` of native/cudnn/Conv_v8.cpp looks for at most."""


class Operand(NamedTuple):
    """A tensor as cuDNN sees it."""

    dtype: str
    """A dtype of torch, such as ``"float16"``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = ALIGNED
    """Of its address, in bytes."""

    def __str__(self) -> str:
        dense = self.strides == contiguous_strides(self.shape)
        strides = "" if dense else "@" + ":".join(map(str, self.strides))
        aligned = "" if self.alignment == ALIGNED else f" aligned to {self.alignment}"
        return f"{self.dtype}[{_list(self.shape)}]{strides}{aligned}"


class ConvolutionQuestion(NamedTuple):
    """A convolution's forward, or one of its gradients.

    ``x`` is the input or its gradient, ``w`` the weight or its gradient and ``y`` the output or its
    gradient, so that all three directions of one layer have the same operands.
    """

    direction: str
    """One of ``DIRECTIONS``."""
    x: Operand
    w: Operand
    y: Operand
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    deterministic: bool = False
    allow_tf32: bool = True
    benchmark: bool = False
    """Every candidate is tried, as with ``torch.backends.cudnn.benchmark``."""
    mode_b: bool = False
    """``TORCH_CUDNN_USE_HEURISTIC_MODE_B``."""
    added: tuple[Operand, Operand] | None = None
    """What is added before a ReLU in the same kernel: a tensor like ``y``, and a bias."""
    alpha: float = 1.0
    """By what the first of them is multiplied."""

    @property
    def operator(self) -> str:
        """The name under which answers are kept."""
        return f"{PREFIX}convolution_{'add_relu' if self.added else self.direction}"

    @property
    def geometry(self) -> str:
        """Everything else that decides the answer, as text."""
        lists = (f"[{_list(numbers)}]" for numbers in (self.padding, self.stride, self.dilation))
        settings = {
            "benchmark": self.benchmark,
            "deterministic": self.deterministic,
            "float32 as ieee": self.x.dtype == "float32" and not self.allow_tf32,
            "heuristics of mode B": self.mode_b and not self.benchmark,
        }
        chosen = ", ".join(name for name, holds in settings.items() if holds)
        added = (*self.added, f"{self.alpha:g}") if self.added else ()
        text = ", ".join(map(str, (self.x, self.w, self.y, *added, *lists)))
        return f"{text}; {chosen}" if chosen else text

    def plain(self) -> dict[str, Any]:
        """Return the question as the process that asks reads it."""
        operands = [one[1:] for one in (self.x, self.w, self.y, *(self.added or ()))]
        own = {"kind": "convolution", "dtype": self.x.dtype, "operands": operands}
        return self._asdict() | own


class AttentionQuestion(NamedTuple):
    """Attention through cuDNN, its forward or its backward.

    Operands are there by name: ``query``, ``key``, ``value`` and ``output``; ``statistics`` where a
    backward follows; ``bias`` where there is a mask; ``gradient`` in a backward.
    """

    direction: str
    """``"forward"`` or ``"backward"``."""
    operands: tuple[tuple[str, Operand], ...]
    causal: bool = False
    dropout: float = 0.0

    @property
    def operator(self) -> str:
        """The name under which answers are kept."""
        return f"{PREFIX}attention_{self.direction}"

    @property
    def geometry(self) -> str:
        """Everything else that decides the answer, as text."""
        text = ", ".join(f"{name}={operand}" for name, operand in self.operands)
        settings = {"causal": self.causal, f"dropout {self.dropout:g}": self.dropout > 0}
        chosen = ", ".join(name for name, holds in settings.items() if holds)
        return f"{text}; {chosen}" if chosen else text

    def plain(self) -> dict[str, Any]:
        """Return the question as the process that asks reads it."""
        operands = {name: one[:3] for name, one in self.operands}
        return self._asdict() | {"kind": "attention", "operands": operands}


Question = ConvolutionQuestion | AttentionQuestion


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]


def without_free_strides(
    shape: Sequence[int], strides: Sequence[int], channels_last: bool
) -> tuple[int, ...]:
    """Return strides where those of dimensions of size 1 follow from the others.

    ``fixSizeOneDimStride`` of ATen/cudnn/Descriptors.h.
    """
    inner = range(len(shape) - 1, 1, -1)
    order = (1, *inner, 0) if channels_last else (*inner, 1, 0)
    fixed, expected = list(strides), 1
    for dim in order:
        if shape[dim] == 1:
            fixed[dim] = expected
        else:
            expected *= shape[dim]
    return tuple(fixed)


def _list(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


class ExecutionPlan(NamedTuple):
    """A plan of cuDNN: the bytes of its workspace, and its engine."""

    workspace: int
    engine: int
    notes: tuple[str, ...] = ()
    """cuDNN's numerical notes, such as ``"tensor core"``."""


class Answer(NamedTuple):
    """Plans in cuDNN's order, the one that runs first; all of them only of a benchmark.

    Without plans cuDNN has no engine for the question, or did not survive it; ``why`` says so.
    """

    plans: tuple[ExecutionPlan, ...] = ()
    why: str = ""
    is_failure: bool = False
    """Whether cuDNN could not be asked, or did not survive it, so that nothing is known."""

    @property
    def workspace(self) -> int | None:
        """The bytes that the allocator is asked for: of a benchmark, those of the largest."""
        return max((plan.workspace for plan in self.plans), default=None)
