"""cuDNN's backend API through ``ctypes``: descriptors, which are what plans are made of.

Runs in the process that asks cuDNN, and needs Python's standard library alone. The numbers are
those of ``cudnn_graph.h``, which are part of cuDNN's binary interface.
"""

import ctypes
import json
from collections.abc import Mapping
from contextlib import ExitStack
from enum import IntEnum
from typing import Any


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


Kinds = dict[str, tuple[int, dict[str, tuple[int, Type]]]]
"""The number of each kind of descriptor, and the number and type of each of its attributes."""


def _parsed(table: str) -> Kinds:
    found: Kinds = {}
    for row in table.split(";"):
        kind, attributes = row.split(":")
        name, number = kind.split()
        listed = (one.split() for one in attributes.split(","))
        found[name] = int(number), {one: (int(at), Type[type_]) for one, at, type_ in listed}
    return found


_KINDS = _parsed("""
    pointwise 0: mode 0 POINTWISE_MODE, precision 1 DATA_TYPE;
    convolution 1: type 100 DATA_TYPE, mode 101 CONVOLUTION_MODE, dilations 102 INT64,
        strides 103 INT64, post_paddings 104 INT64, pre_paddings 105 INT64, dimensions 106 INT64;
    engine 2: number 1301 INT64, notes 1303 NUMERICAL_NOTE, behavior 1305 BEHAVIOR_NOTE;
    configuration 3: engine 300 DESCRIPTOR, workspace 303 INT64;
    heuristics 4: mode 200 HEURISTICS_MODE, graph 201 DESCRIPTOR, results 202 DESCRIPTOR,
        device 204 DESCRIPTOR;
    plan 5: configuration 401 DESCRIPTOR, workspace 402 INT64, device 407 DESCRIPTOR;
    forward 10: alpha 700 FLOAT, beta 701 FLOAT, convolution 702 DESCRIPTOR, w 703 DESCRIPTOR,
        x 704 DESCRIPTOR, y 705 DESCRIPTOR;
    backward_weight 11: alpha 712 FLOAT, beta 713 FLOAT, convolution 714 DESCRIPTOR,
        w 715 DESCRIPTOR, x 716 DESCRIPTOR, y 717 DESCRIPTOR;
    backward_input 12: alpha 706 FLOAT, beta 707 FLOAT, convolution 708 DESCRIPTOR,
        w 709 DESCRIPTOR, x 710 DESCRIPTOR, y 711 DESCRIPTOR;
    pointwise_operation 13: described 750 DESCRIPTOR, x 751 DESCRIPTOR, b 752 DESCRIPTOR,
        y 753 DESCRIPTOR, alpha 754 FLOAT, alpha2 755 FLOAT;
    graph 15: operations 801 DESCRIPTOR;
    tensor 17: alignment 900 INT64, type 901 DATA_TYPE, shape 902 INT64, strides 903 INT64,
        id 906 INT64, virtual 907 BOOLEAN;
    device 38: json 2702 CHAR
""")
"""``cudnnBackendDescriptorType_t`` and ``cudnnBackendAttributeName_t``."""
INSTANT, B, FALLBACK = range(3)
"""``cudnnBackendHeurMode_t``."""
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

    def make(self, kind: str, double: bool = False, **attributes: Any) -> int:
        """Return a descriptor with attributes, lists or single values, but for those that are None;
        its numbers may be ``double``. Raises ``CudnnError``.
        """
        made = self.create(kind)
        for name, value in attributes.items():
            if value is None:
                continue
            number, type_ = _KINDS[kind][1][name]
            if double and type_ is Type.FLOAT:
                type_ = Type.DOUBLE
            values = value if isinstance(value, (list, tuple, bytes)) else [value]
            array = (_C_TYPES.get(type_, ctypes.c_int) * len(values))(*values)
            self._call("cudnnBackendSetAttribute", made, number, type_, len(values), array)
        self._call("cudnnBackendFinalize", made)
        return made

    def create(self, kind: str) -> int:
        """Return a descriptor that has nothing yet."""
        made = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", _KINDS[kind][0], ctypes.byref(made))
        self._made.callback(self._library.cudnnBackendDestroyDescriptor, made)
        return int(made.value or 0)

    def numbers(self, kind: str, of: int, attribute: str, most: int = 1) -> list[int]:
        """Return an attribute of a descriptor, at ``most`` so many numbers."""
        array = (_C_TYPES.get(_KINDS[kind][1][attribute][1], ctypes.c_int) * most)()
        found = self._read(kind, of, attribute, most, array)
        return list(array)[:found]

    def descriptors(
        self, kind: str, of: int, attribute: str, made: str, count: int | None = None
    ) -> list[int]:
        """Return an attribute that is a list of descriptors, all of them without a ``count``."""
        if count is None:
            count = self._read(kind, of, attribute, 0, None)
        array = (ctypes.c_void_p * count)(*(self.create(made) for _ in range(count)))
        found = self._read(kind, of, attribute, count, array)
        return [int(one or 0) for one in list(array)[:found]]

    def device(self, properties: Mapping[str, Any]) -> int:
        """Return the descriptor of a GPU that need not be there."""
        return self.make("device", json=json.dumps(properties).encode() + b"\0")

    def _read(self, kind: str, of: int, attribute: str, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        asked = of, *_KINDS[kind][1][attribute], most, ctypes.byref(count)
        self._call("cudnnBackendGetAttribute", *asked, array)
        return count.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cudnnGetErrorString(status).decode()
            raise CudnnError(f"{name}: {text}")
