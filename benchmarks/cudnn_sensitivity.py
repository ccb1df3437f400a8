"""Which properties of a GPU cuDNN's answers depend on, tried with every engine that comes up.

    python -m benchmarks.cudnn_sensitivity

Convolutions of a few of torchvision's models are asked for five GPUs. For each engine and GPU one
of them is asked again with every property of the GPU's description changed, one at a time, to half
and to one and a half. Needs torchvision and ``pytest-torchmem[cudnn]``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from tabulate import tabulate

from benchmarks.cudnn_answers import GPUS, Recorder, questions_of
from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.cudnn.library import Library, library
from pytest_torchmem.cudnn.questions import Answer, Question
from pytest_torchmem.targets.gpus import find_gpu

MODELS = ("resnet50", "mobilenet_v2", "convnext_tiny")
FACTORS = (0.5, 1.5)


def changed(value: Any, factor: float) -> Any:
    """Return a property that is different; a name stays one."""
    if isinstance(value, list):
        return [int(number * factor) for number in value]
    if isinstance(value, str):
        return f"{value} {factor}"
    return int(value * factor) if value > 1 else 1 - value


def ask(asked: Library, device: dict[str, Any], question: Question) -> Answer | None:
    """Return the answer for a description of a GPU, without what is remembered."""
    message = json.dumps([device, question.plain()])
    return asked._asked(message) or asked._asked(message)


def main() -> None:
    """Print how many answers change with each property."""
    found = library()
    if isinstance(found, str):
        sys.exit(found)
    recorder = Recorder(found)
    for name in MODELS:
        questions_of(name, recorder)
    chosen: dict[tuple[str, int], tuple[Question, Answer]] = {}
    for gpu in map(find_gpu, GPUS):
        for question in recorder.questions:
            answer = found.ask(gpu.capability, gpu.multiprocessors, question)
            if answer.plans:
                chosen.setdefault((gpu.name, answer.plans[0].engine), (question, answer))
    different, workspaces = Counter[str](), Counter[str]()
    for (name, _), (question, answer) in chosen.items():
        gpu = find_gpu(name)
        device = device_properties(gpu.capability, gpu.multiprocessors)
        for key, value in device.items():
            for factor in FACTORS:
                other = ask(found, {**device, key: changed(value, factor)}, question)
                plans = other.plans if other is not None else ()
                different[key] += plans != answer.plans
                workspaces[key] += [plan.workspace for plan in plans] != [answer.workspace]
    engines = {engine for _, engine in chosen}
    print(f"{len(recorder.questions)} convolutions, {len(engines)} engines, {len(chosen)} tried,")
    print(f"each property {len(FACTORS)} times; cuDNN {found.version}")
    rows = [(key, different[key], workspaces[key]) for key in device]
    print(tabulate(rows, headers=("property", "other plans", "other workspaces")))


if __name__ == "__main__":
    main()
