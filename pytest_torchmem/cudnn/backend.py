"""cuDNN's backend API through ``ctypes``: descriptors, which are what plans are made of.

Runs in the process that asks cuDNN, and needs Python's standard library alone. The numbers are
those of ``cudnn_graph.h``, which are part of cuDNN's binary interface.
"""

import ctypes
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import IntEnum
from typing import Any


class DescriptorType(IntEnum):
    """``cudnnBackendDescriptorType_t``."""

    POINTWISE = 0
    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIGURATION = 3
    HEURISTICS = 4
    PLAN = 5
    CONVOLUTION_FORWARD = 10
    CONVOLUTION_BACKWARD_WEIGHT = 11
    CONVOLUTION_BACKWARD_INPUT = 12
    POINTWISE_OPERATION = 13
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Type(IntEnum):
    """``cudnnBackendAttributeType_t``."""

    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    NUMERICAL_NOTE = 11
    POINTWISE_MODE = 14
    DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    CHAR = 24


class Attribute(IntEnum):
    """``cudnnBackendAttributeName_t``."""

    POINTWISE_MODE = 0
    POINTWISE_PRECISION = 1
    CONVOLUTION_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIGURATION_ENGINE = 300
    CONFIGURATION_WORKSPACE = 303
    PLAN_CONFIGURATION = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    POINTWISE_DESCRIBED = 750
    POINTWISE_X = 751
    POINTWISE_B = 752
    POINTWISE_Y = 753
    POINTWISE_ALPHA = 754
    POINTWISE_ALPHA2 = 755
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_SHAPE = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    TENSOR_VIRTUAL = 907
    ENGINE_NUMBER = 1301
    ENGINE_NOTES = 1303
    ENGINE_BEHAVIOR = 1305
    DEVICE_JSON = 2702


#: The operation of a convolution by its direction, and the first of its attributes' numbers: alpha,
#: beta, the convolution, w, x and y.
OPERATIONS = {
    "forward": (DescriptorType.CONVOLUTION_FORWARD, 700),
    "backward_input": (DescriptorType.CONVOLUTION_BACKWARD_INPUT, 706),
    "backward_weight": (DescriptorType.CONVOLUTION_BACKWARD_WEIGHT, 712),
}
Attributes = Mapping[int, tuple[Type, Sequence[Any]]]
"""Values of a descriptor, each with its type."""


class HeuristicMode(IntEnum):
    """``cudnnBackendHeurMode_t``."""

    INSTANT = 0
    B = 1
    FALLBACK = 2


#: ``cudnnDataType_t``, by torch's dtypes.
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
#: ``cudnnBackendNumericalNote_t``.
NOTES = (
    "tensor core",
    "down-converted inputs",
    "reduced-precision reduction",
    "fft",
    "nondeterministic",
    "winograd",
    "winograd 4x4",
    "winograd 6x6",
    "winograd 13x13",
    "strict nan",
)
_C_TYPES: dict[Type, Any] = {
    Type.BOOLEAN: ctypes.c_bool,
    Type.INT64: ctypes.c_int64,
    Type.FLOAT: ctypes.c_float,
    Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: ctypes.c_void_p,
    Type.CHAR: ctypes.c_char,
}


class CudnnError(Exception):
    """cuDNN refused something; it says what, and with which status."""


class Backend:
    """The library, and the descriptors that one question has made."""

    def __init__(self, path: str) -> None:
        """Load ``libcudnn.so.9``; raises ``OSError``."""
        library = ctypes.CDLL(path)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        of: Any = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p]
        library.cudnnBackendSetAttribute.argtypes = of
        library.cudnnBackendGetAttribute.argtypes = [*of, ctypes.c_void_p]
        library.cudnnBackendFinalize.argtypes = of[:1]
        self._library = library
        self._made = ExitStack()

    @property
    def version(self) -> tuple[int, int, int]:
        """Major, minor and patch level."""
        number = int(self._library.cudnnGetVersion())
        return number // 10000, number // 100 % 100, number % 100

    def release(self) -> None:
        """Destroy the descriptors made so far."""
        self._made.close()

    def make(self, kind: DescriptorType, attributes: Attributes) -> int:
        """Return a descriptor with these attributes; raises ``CudnnError``."""
        made = self.create(kind)
        for attribute, (type_, values) in attributes.items():
            array = (_C_TYPES.get(type_, ctypes.c_int) * len(values))(*values)
            self._call("cudnnBackendSetAttribute", made, attribute, type_, len(values), array)
        self._call("cudnnBackendFinalize", made)
        return made

    def create(self, kind: DescriptorType) -> int:
        """Return a descriptor that has nothing yet."""
        made = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", int(kind), ctypes.byref(made))
        self._made.callback(self._library.cudnnBackendDestroyDescriptor, made)
        return int(made.value or 0)

    def numbers(self, of: int, attribute: Attribute, type_: Type, most: int = 1) -> list[int]:
        """Return an attribute of a descriptor, at ``most`` so many numbers."""
        array = (_C_TYPES.get(type_, ctypes.c_int) * most)()
        found = self._read(of, attribute, type_, most, array)
        return list(array)[:found]

    def descriptors(
        self, of: int, attribute: Attribute, kind: DescriptorType, count: int | None = None
    ) -> list[int]:
        """Return an attribute that is a list of descriptors, all of them without a ``count``."""
        if count is None:
            count = self._read(of, attribute, Type.DESCRIPTOR, 0, None)
        array = (ctypes.c_void_p * count)(*(self.create(kind) for _ in range(count)))
        found = self._read(of, attribute, Type.DESCRIPTOR, count, array)
        return [int(one or 0) for one in list(array)[:found]]

    def device(self, properties: Mapping[str, Any]) -> int:
        """Return the descriptor of a GPU that need not be there."""
        text = json.dumps(properties).encode() + b"\0"
        return self.make(DescriptorType.DEVICE, {Attribute.DEVICE_JSON: (Type.CHAR, text)})

    def _read(self, of: int, attribute: Attribute, type_: Type, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        found = ctypes.byref(count)
        self._call("cudnnBackendGetAttribute", of, attribute, type_, most, found, array)
        return count.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cudnnGetErrorString(status).decode()
            raise CudnnError(f"{name}: {text}")
