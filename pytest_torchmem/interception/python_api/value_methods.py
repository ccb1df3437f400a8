"""Numbers, arrays and text that a program takes out of a tensor."""

import math
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.interception.layouts.sparse_values import parts_of, put_together
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.values.captured import not_permitted
from pytest_torchmem.interception.values.known import NotKnown
from pytest_torchmem.interception.values.unknown_numbers import functions_of_math
from pytest_torchmem.torch_private.keys import FAKE, excluded, is_excluded
from pytest_torchmem.torch_private.patches import Replacements


class ValueMethods(Functions):
    """Methods of ``torch.Tensor`` that give values to Python, or need them."""

    def replacements(self) -> Replacements:
        """Return the methods, and what else reads numbers."""
        return [*super().replacements(), (math, functions_of_math())]

    @instead_of(Tensor)
    def item(self, original: Any, tensor: Tensor) -> Any:
        """Return a number; one that is not known may be told, and decides nothing."""
        contents = self._trace.values.contents
        record = self._trace.record(tensor) or self._trace.record_at_compiler(tensor)
        if (
            record is None
            or contents.known(record) is not None
            or contents.assumed(record) is not None
            or tensor.numel() != 1
            or tensor.dtype is torch.bool
            or tensor.dtype.is_complex
            or self._trace.values.uses_captured(record)
        ):
            return original(tensor)
        if self._trace.compiles:
            # What makes fake tensors asks for numbers on the host, and takes those that are not
            # finite as they come (torch/_subclasses/fake_tensor.py, ``from_real_tensor``).
            return math.nan
        return self._trace.values.number(tensor)

    @instead_of(Tensor, "__float__", "__int__", "__index__", "__bool__", "__complex__")
    def number_in_cpp(self, original: Any, tensor: Tensor) -> Any:
        """Convert to a number, as C++ asks elements of a list to, too.

        It excludes the key of the interception meanwhile (torch/csrc/utils/tensor_new.cpp,
        ``internal_new_from_data``), and reads memory that holds nothing if a value is not known.
        """
        record = self._trace.without_memory(tensor) if is_excluded(FAKE) else None
        if record is None:
            return original(tensor)
        with self._trace.working():
            asked = "read an unknown value of a tensor in C++"
            return original(self._trace.values.stand_in(tensor.detach(), record, asked))

    @instead_of(Tensor)
    def tolist(self, original: Any, tensor: Tensor) -> Any:
        """Return lists of numbers."""
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor)
        with self._trace.working():
            return original(self._real(tensor, record, "tolist"))

    @instead_of(Tensor)
    def numpy(self, original: Any, tensor: Tensor, *, force: bool = False) -> Any:
        """Return an array that keeps ``tensor`` alive, as one of its memory would."""
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor, force=force)
        if force:
            return self.numpy(original, tensor.detach().cpu())
        with self._trace.working():
            self._trace.values.contents.begin_writing(record)
            real = self._real(tensor, record, "numpy")
            if tensor.requires_grad:
                real = real.clone().requires_grad_()  # which numpy refuses
            return _array_that_keeps(original(real), tensor)

    @instead_of(Tensor, "__dlpack__")
    def dlpack(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule of values that are known."""
        contents = self._trace.values.contents
        record = self._trace.without_memory(tensor)
        if record is None:
            return original(tensor, *args, **kwargs)
        contents.begin_writing(record)
        if contents.known(record) is None:
            raise self._trace.values.unknown(".__dlpack__() of a tensor of unknown values")
        with self._trace.working():
            return original(contents.value(record, tensor.detach()), *args, **kwargs)

    @instead_of(Tensor, "__repr__")
    def text(self, original: Any, tensor: Tensor, *, tensor_contents: Any = None) -> str:
        """Return what a tensor without memory is printed as."""
        if self._trace.describes:
            return f"tensor(..., size={tuple(tensor.shape)})"
        record = self._trace.without_memory(tensor)
        is_known = record is not None and self._trace.values.contents.known(record) is not None
        sparse = tensor.layout is not torch.strided
        if record is None or ((is_known or not tensor.numel()) and not sparse):
            # By operators, which take memory of their own. A guard that torch makes outside of the
            # program's modes puts the keys back as they are there, and lives until these are
            # entered anew (torch/_tensor_str.py, ``_str``).
            with excluded(FAKE, is_excluded(FAKE)):
                return cast(str, original(tensor, tensor_contents=tensor_contents))
        if is_known:
            with suppress(NotKnown):
                return self._known_text(original, tensor, record)
        gradient = ", requires_grad=True" if tensor.requires_grad else ""
        return (
            f"tensor(..., device='{record.ledger.device}', size={tuple(tensor.shape)}, "
            f"dtype={tensor.dtype}{f', layout={tensor.layout}' if sparse else ''}{gradient})"
        )

    def _known_text(self, original: Any, tensor: Tensor, record: StorageRecord) -> str:
        """Return what torch prints of a sparse tensor of known values, on the device it is on."""
        known = self._trace.values.known_value
        with self._trace.working():
            real = put_together(tensor, [known(part) for part in parts_of(tensor)])
            text = str(original(real))
        told = "" if record.ledger.device.type == "cpu" else f", device='{record.ledger.device}'"
        told += ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
        told += "" if tensor.is_leaf else f", grad_fn=<{type(tensor.grad_fn).__name__}>"
        return f"{text[:-1]}{told})" if text.endswith(")") else text

    @instead_of(nn.functional)
    def one_hot(self, original: Any, tensor: Tensor, num_classes: int = -1) -> Tensor:
        """Make the output without the check of the classes, which decides nothing where their
        number is given; native/Onehot.cpp.
        """
        contents = self._trace.values.contents
        record = self._trace.record(tensor)
        if record is None or num_classes <= 0 or not tensor.numel():
            return cast(Tensor, original(tensor, num_classes))
        if contents.known(record) is not None:
            return cast(Tensor, original(tensor, num_classes))
        if record.ledger.device.type == "cpu":
            tensor.min(), tensor.max()
        return tensor.new_zeros((*tensor.shape, num_classes)).scatter_(-1, tensor.unsqueeze(-1), 1)

    def _real(self, tensor: Tensor, record: StorageRecord, method: str) -> Tensor:
        asked = f".{method}() of a tensor of unknown values"
        if self._trace.values.uses_captured(record):
            raise not_permitted()
        return self._trace.values.stand_in(tensor.detach(), record, asked)


def _array_that_keeps(array: Any, tensor: Tensor) -> Any:
    """Return an array of the same memory that holds ``tensor``, as one made of it would."""
    import numpy

    return numpy.asarray(_Owner(array, tensor))


class _Owner:
    """What an array's memory belongs to; numpy keeps it as the array's base."""

    def __init__(self, array: Any, tensor: Tensor) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array, self.tensor = array, tensor
