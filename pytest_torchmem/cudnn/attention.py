"""The execution plan of attention through cuDNN, as ATen builds its graph.

native/cudnn/MHA.cpp: ``build_graph`` and ``build_graph_backward``. Attention is a graph of a dozen
operations, which cudnn-frontend writes out; ATen uses its C++ headers, and this its Python package
(``nvidia-cudnn-frontend``). Runs in the process that asks cuDNN.
"""

from __future__ import annotations

import importlib
import json
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from pytest_torchmem.cudnn.answers import Answer, ExecutionPlan

_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
_Graph = Any
_Tensor = Any


class Frontend:
    """cudnn-frontend, imported at the first question about attention."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._module: Any = None

    def answer(self, device: Mapping[str, Any], question: Mapping[str, Any]) -> Answer:
        """Return the plan for a question, and why there is none otherwise."""
        if not self._folder:
            return Answer(why="nvidia-cudnn-frontend is not installed")
        try:
            graph = self._graph(device, question)
            tensors = self._tensors(graph, question)
            if question["direction"] == "forward":
                self._forward(graph, tensors, question)
            else:
                self._backward(graph, tensors, question)
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

    def _graph(self, device: Mapping[str, Any], question: Mapping[str, Any]) -> _Graph:
        single = self._type("float32")
        return self._cudnn.pygraph(
            io_data_type=self._type(question["operands"]["query"][0]),
            intermediate_data_type=single,
            compute_data_type=single,
            sm_version=device["deviceVer"] // 10,
            device_property=self._cudnn.create_device_properties(json.dumps(device)),
        )

    def _tensors(self, graph: _Graph, question: Mapping[str, Any]) -> dict[str, _Tensor]:
        made = {
            name: graph.tensor(name=name, dim=shape, stride=strides, data_type=self._type(dtype))
            for name, (dtype, shape, strides) in question["operands"].items()
            if question["direction"] == "backward" or name not in ("output", "statistics")
        }
        ones = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1]}
        made["scale"] = graph.tensor(
            name="scale", is_pass_by_value=True, data_type=self._type("float32"), **ones
        )
        if question["dropout"]:
            integers = self._cudnn.data_type.INT64
            made["seed"] = graph.tensor(name="seed", data_type=integers, **ones)
            made["offset"] = graph.tensor(name="offset", data_type=integers, **ones)
        return made

    def _options(
        self, tensors: Mapping[str, _Tensor], question: Mapping[str, Any]
    ) -> dict[str, Any]:
        options: dict[str, Any] = {
            "q": tensors["query"],
            "k": tensors["key"],
            "v": tensors["value"],
            "attn_scale": tensors["scale"],
            "use_causal_mask": question["causal"],
        }
        if "bias" in tensors:
            options["bias"] = tensors["bias"]
        if question["dropout"]:
            options["dropout"] = (question["dropout"], tensors["seed"], tensors["offset"])
        return options

    def _forward(
        self, graph: _Graph, tensors: Mapping[str, _Tensor], question: Mapping[str, Any]
    ) -> None:
        operands = question["operands"]
        given = self._options(tensors, question)
        output, statistics = graph.sdpa(is_inference="statistics" not in operands, **given)
        self._give(output, operands["output"])
        if "statistics" in operands:
            self._give(statistics, operands["statistics"])

    def _backward(
        self, graph: _Graph, tensors: Mapping[str, _Tensor], question: Mapping[str, Any]
    ) -> None:
        gradients = graph.sdpa_backward(
            o=tensors["output"],
            dO=tensors["gradient"],
            stats=tensors["statistics"],
            **self._options(tensors, question),
        )
        for gradient, name in zip(gradients, ("query", "key", "value"), strict=True):
            self._give(gradient, question["operands"][name])

    def _give(self, tensor: _Tensor, geometry: tuple[str, list[int], list[int]]) -> None:
        dtype, shape, strides = geometry
        tensor.set_output(True).set_dim(shape).set_stride(strides).set_data_type(self._type(dtype))
