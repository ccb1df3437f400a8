"""cuDNN's execution plans that ATen would take for convolutions and for attention.

native/cudnn/Conv_v8.cpp: ``build_opgraph``, ``build_opgraph_fused``, ``get_generator_sources``,
``filterEngineConfigs``, ``try_configs`` and ``get_plans_from_find``.

native/cudnn/MHA.cpp: ``build_graph`` and ``build_graph_backward``. Attention is a graph of a dozen
operations, which cudnn-frontend writes out; ATen uses its C++ headers, and this its Python package
(``nvidia-cudnn-frontend``).

At the end is the process that asks cuDNN: a question a line on its input, an answer a line on its
output. It never holds torch, and is started with ``library_path`` of ``questions.py`` in
``LD_LIBRARY_PATH``. cuDNN may end it (9.10.2 did, at a bfloat16 convolution of 4 channels):
whoever asks then starts another one.
"""

import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from pytest_torchmem.cudnn.backend import (
    DATA_TYPES,
    FALLBACK,
    INSTANT,
    NOTES,
    B,
    Backend,
    CudnnError,
)
from pytest_torchmem.cudnn.questions import Answer, ExecutionPlan

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
        device_descriptor = backend.device(device)
        graph = _graph_of(backend, question)
        for configuration, notes in _configurations(backend, device_descriptor, graph, question):
            try:
                found.append(_plan_of(backend, device_descriptor, configuration, notes))
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
