"""cuDNN's execution plans that ATen would take for convolutions and for attention.

Its backend API is called through ``ctypes``: plans are made of descriptors. Their numbers are those
of ``cudnn_graph.h``, which are part of cuDNN's binary interface.

native/cudnn/Conv_v8.cpp: ``build_opgraph``, ``build_opgraph_fused``, ``get_generator_sources``,
``filterEngineConfigs``, ``try_configs`` and ``get_plans_from_find``.

native/cudnn/MHA.cpp: ``build_graph`` and ``build_graph_backward``. Attention is a graph of a dozen
operations, which cudnn-frontend writes out; ATen uses its C++ headers, and this its Python package
(``nvidia-cudnn-frontend``).

At the end is the process that asks cuDNN: a question a line on its input, an answer a line on its
output. It holds Python's standard library alone, never torch, and is started with ``library_path``
of ``questions.py`` in ``LD_LIBRARY_PATH``. cuDNN may end it (9.10.2 did, at a bfloat16 convolution
of 4 channels): whoever asks then starts another one.
"""

import ctypes
import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from pytest_torchmem.cudnn.questions import Answer, ExecutionPlan

_ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "DATA_TYPE": (1, ctypes.c_int),
    "BOOLEAN": (2, ctypes.c_bool),
    "INT64": (3, ctypes.c_int64),
    "FLOAT": (4, ctypes.c_float),
    "DOUBLE": (5, ctypes.c_double),
    "CONVOLUTION_MODE": (7, ctypes.c_int),
    "HEURISTICS_MODE": (8, ctypes.c_int),
    "NUMERICAL_NOTE": (11, ctypes.c_int),
    "POINTWISE_MODE": (14, ctypes.c_int),
    "DESCRIPTOR": (15, ctypes.c_void_p),
    "BEHAVIOR_NOTE": (19, ctypes.c_int),
    "CHAR": (24, ctypes.c_char),
}
"""``cudnnBackendAttributeType_t``, and what a value of it is in C."""
Kinds = dict[str, tuple[int, dict[str, tuple[int, int, Any]]]]
"""The number of each kind of descriptor, and the number and type of each of its attributes."""


def _parsed(table: str) -> Kinds:
    found: Kinds = {}
    for row in table.split(";"):
        kind, attributes = row.split(":")
        name, number = kind.split()
        listed = (one.split() for one in attributes.split(","))
        own = {one: (int(at), *_ATTRIBUTES[type_]) for one, at, type_ in listed}
        found[name] = int(number), own
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
            number, type_, in_c = _KINDS[kind][1][name]
            if double and in_c is ctypes.c_float:
                type_, in_c = _ATTRIBUTES["DOUBLE"]
            values = value if isinstance(value, (list, tuple, bytes)) else [value]
            array = (in_c * len(values))(*values)
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
        array = (_KINDS[kind][1][attribute][2] * most)()
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

    def _read(self, kind: str, of: int, attribute: str, most: int, array: Any) -> int:
        count = ctypes.c_int64()
        asked = of, *_KINDS[kind][1][attribute][:2], most, ctypes.byref(count)
        self._call("cudnnBackendGetAttribute", *asked, array)
        return count.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cudnnGetErrorString(status).decode()
            raise CudnnError(f"{name}: {text}")


Question = Mapping[str, Any]
"""A question as it comes over the pipe."""
_CROSS_CORRELATION = 1
_ADD, _RELU = 0, 100
"""``cudnnPointwiseMode_t``."""
_TENSOR_CORE, _DOWN_CONVERTED, _NONDETERMINISTIC = 0, 1, 4
_BEHAVIORS = 16
"""More than there are behavior notes."""
_FIRST = 4
"""How many configurations are asked for at first."""


def answer(backend: Backend, device: Mapping[str, Any], question: Question) -> Answer:
    """Return the plans for a question: the first that can be built, or all of a benchmark."""
    found: list[ExecutionPlan] = []
    refused = ""
    try:
        gpu = backend.make("device", json=json.dumps(device).encode() + b"\0")
        graph = _graph_of(backend, question)
        for configuration, notes in _configurations(backend, gpu, graph, question):
            try:
                found.append(_plan_of(backend, gpu, configuration, notes))
            except CudnnError as error:  # the next one is taken, as ATen does
                refused = refused or str(error)
                continue
            if not question["benchmark"]:
                break
    except CudnnError as error:
        refused = str(error)
    finally:
        backend.release()
    return Answer(tuple(found), "" if found else refused or "cuDNN has no engine for it")


def _graph_of(backend: Backend, question: Question) -> int:
    """``build_opgraph``, and ``build_opgraph_fused`` where something is added before a ReLU."""
    x, w, y, *added = (
        _tensor(backend, name, operand, question["dtype"])
        for name, operand in zip("xwyzb", question["operands"], strict=False)
    )
    if not added:
        operations = [_convolution(backend, question, x, w, y)]
    else:
        of_y = question["operands"][2]
        product, sum_, biased = (_tensor(backend, name, of_y, virtual=True) for name in "CAB")
        operations = [
            _convolution(backend, question, x, w, product),
            _pointwise(backend, _ADD, product, added[0], sum_, question["alpha"]),
            _pointwise(backend, _ADD, sum_, added[1], biased),
            _pointwise(backend, _RELU, biased, None, y),
        ]
    return backend.make("graph", operations=operations)


def _tensor(
    backend: Backend, name: str, operand: Sequence[Any], dtype: str = "", virtual: bool = False
) -> int:
    shape, strides, alignment = operand
    return backend.make(
        "tensor",
        type=DATA_TYPES[dtype or "float32"],
        shape=shape,
        strides=strides,
        id=ord(name),
        alignment=alignment,
        virtual=virtual,
    )


def _convolution(backend: Backend, question: Question, x: int, w: int, y: int) -> int:
    double = question["dtype"] == "float64"
    described = backend.make(
        "convolution",
        type=DATA_TYPES["float64" if double else "float32"],
        mode=_CROSS_CORRELATION,
        dimensions=len(question["stride"]),
        strides=question["stride"],
        pre_paddings=question["padding"],
        post_paddings=question["padding"],
        dilations=question["dilation"],
    )
    operands = {"convolution": described, "x": x, "w": w, "y": y}
    return backend.make(question["direction"], double, alpha=1.0, beta=0.0, **operands)


def _pointwise(
    backend: Backend, mode: int, x: int, other: int | None, y: int, alpha2: float | None = None
) -> int:
    alpha = None if alpha2 is None else 1.0
    described = backend.make("pointwise", mode=mode, precision=DATA_TYPES["float32"])
    operands: dict[str, Any] = {"described": described, "x": x, "b": other, "y": y}
    return backend.make("pointwise_operation", alpha=alpha, alpha2=alpha2, **operands)


def _configurations(
    backend: Backend, device: int, graph: int, question: Question
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield what the heuristics list and ATen keeps of it, then the same of the fallbacks."""
    wanted = B if question["mode_b"] and not question["benchmark"] else INSTANT
    for mode in (wanted, FALLBACK):
        heuristics = backend.make("heuristics", graph=graph, mode=mode, device=device)
        for configuration in _listed(backend, heuristics, 0 if question["benchmark"] else _FIRST):
            engine = _engine_of(backend, configuration)
            notes = backend.numbers("engine", engine, "notes", len(NOTES))
            if not _is_left_out(frozenset(notes), question):
                yield configuration, frozenset(notes)


def _listed(backend: Backend, heuristics: int, first: int) -> Iterator[int]:
    """Yield the configurations of a list in its order, the ``first`` ones before the rest is made.
    cuDNN makes what it is asked for: forty take it ten milliseconds, and the first is mostly taken.
    """
    results = "heuristics", heuristics, "results", "configuration"
    yielded = 0
    if first:
        beginning = backend.descriptors(*results, first)
        yield from beginning
        yielded = len(beginning)
        if yielded < first:
            return
    yield from backend.descriptors(*results)[yielded:]


def _is_left_out(notes: frozenset[int], question: Question) -> bool:
    """``filterEngineConfigs``."""
    if _DOWN_CONVERTED in notes or (question["deterministic"] and _NONDETERMINISTIC in notes):
        return True
    ieee = question["dtype"] == "float32" and not question["allow_tf32"]
    return ieee and _TENSOR_CORE in notes


def _engine_of(backend: Backend, configuration: int) -> int:
    return backend.descriptors("configuration", configuration, "engine", "engine", 1)[0]


def _plan_of(backend: Backend, device: int, config: int, notes: frozenset[int]) -> ExecutionPlan:
    """Return the plan of a config; raises ``CudnnError`` where it cannot be built."""
    engine = _engine_of(backend, config)
    number = backend.numbers("engine", engine, "number")[0]
    workspace = _without_compiling(backend, config, engine)
    if workspace is None:
        plan = backend.make("plan", configuration=config, device=device)
        workspace = backend.numbers("plan", plan, "workspace")[0]
    return ExecutionPlan(workspace, number, tuple(NOTES[note] for note in sorted(notes)))


def _without_compiling(backend: Backend, configuration: int, engine: int) -> int | None:
    """Return the workspace of an engine that compiles its kernel, half a second for each plan.

    Its configuration knows the workspace already. ``None`` for other engines, and where it does
    not.
    """
    compiles = 0  # CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION
    try:
        if compiles not in backend.numbers("engine", engine, "behavior", _BEHAVIORS):
            return None
        found = backend.numbers("configuration", configuration, "workspace")
    except CudnnError:
        return None
    return found[0] if found and found[0] >= 0 else None


_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Frontend:
    """cudnn-frontend, imported at the first question about attention."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._module: Any = None

    def answer(self, device: Mapping[str, Any], question: Question) -> Answer:
        """Return the plan for a question, and why there is none otherwise."""
        if not self._folder:
            return Answer(why="nvidia-cudnn-frontend is not installed")
        try:
            graph = self._graph(device, question)
            self._build(graph, question)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([self._cudnn.heur_mode.A])
            graph.check_support()
            graph.build_plans()
            return Answer((ExecutionPlan(int(graph.get_workspace_size()), -1),))
        except Exception as error:  # whatever its C++ raises
            return Answer(why=f"cudnn-frontend: {error}"[:300])

    @property
    def _cudnn(self) -> Any:
        if self._module is None:
            sys.path.append(self._folder)
            sys.modules["torch"] = None  # type: ignore[assignment]
            # It would look for a cuDNN of its own before the one that is loaded.
            found, sysconfig.get_path = sysconfig.get_path, lambda *_: "/nowhere"
            try:
                self._module = importlib.import_module("cudnn")
            finally:
                sysconfig.get_path = found
        return self._module

    def _type(self, name: str) -> Any:
        return getattr(self._cudnn.data_type, _TYPES[name])

    def _graph(self, device: Mapping[str, Any], question: Question) -> Any:
        single = self._type("float32")
        return self._cudnn.pygraph(
            io_data_type=self._type(question["operands"]["query"][0]),
            intermediate_data_type=single,
            compute_data_type=single,
            sm_version=device["deviceVer"] // 10,
            device_property=self._cudnn.create_device_properties(json.dumps(device)),
        )

    def _build(self, graph: Any, question: Question) -> None:
        """Add attention to a graph, and say where its results lie."""
        operands, backward = question["operands"], question["direction"] == "backward"
        made = {
            name: graph.tensor(name=name, dim=shape, stride=strides, data_type=self._type(dtype))
            for name, (dtype, shape, strides) in operands.items()
            if backward or name not in ("output", "statistics")
        }
        ones = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
        single, integers = self._type("float32"), self._cudnn.data_type.INT64
        scale = graph.tensor(name="scale", is_pass_by_value=True, data_type=single, **ones)
        options = {"q": made["query"], "k": made["key"], "v": made["value"], "attn_scale": scale}
        options["use_causal_mask"] = question["causal"]
        if "bias" in made:
            options["bias"] = made["bias"]
        if question["dropout"]:
            state = (
                graph.tensor(name=one, data_type=integers, **ones) for one in ("seed", "offset")
            )
            options["dropout"] = (question["dropout"], *state)
        if backward:
            names = ["query", "key", "value"]
            rest = {"o": made["output"], "dO": made["gradient"], "stats": made["statistics"]}
            results = graph.sdpa_backward(**rest, **options)
        else:
            names = ["output", "statistics"]
            results = graph.sdpa(is_inference="statistics" not in operands, **options)
        for result, name in zip(results, names, strict=True):
            if name in operands:
                dtype, shape, strides = operands[name]
                result.set_output(True).set_dim(shape).set_stride(strides)
                result.set_data_type(self._type(dtype))


def main(path: str, frontend: str = "") -> None:
    """Answer questions until the input ends; ``frontend`` is cudnn-frontend's folder, or ""."""
    # cuDNN and what it loads may print; the answers have the pipe for themselves.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        backend = Backend(path)
        version = backend.version
    except (OSError, AttributeError) as error:
        _write(pipe, {"error": str(error)})
        return
    _write(pipe, {"version": list(version)})
    attention = Frontend(frontend)
    for line in sys.stdin:
        device, question = json.loads(line)
        if question["kind"] == "attention":
            found = attention.answer(device, question)
        else:
            found = answer(backend, device, question)
        _write(pipe, {"plans": found.plans, "why": found.why})


def _write(pipe: IO[str], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()
