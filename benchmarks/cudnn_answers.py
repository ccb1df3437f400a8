"""Every convolution of torchvision's models, asked of cuDNN for several GPUs: what it answers, and
how fast.

    python -m benchmarks.cudnn_answers [MODELS]
    python -m benchmarks.cudnn_answers --recorded DIR    beside what cuDNN told on a GPU

A step of each model (forward and backward) is traced in three types and both layouts, and what the
traces ask is asked for five GPUs. Needs torchvision and ``pytest-torchmem[cudnn]``. Processor time
of the process that asks cuDNN is measured, since a question takes milliseconds.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.truth.recording import recorded_convolutions
from pytest_torchmem import trace
from pytest_torchmem.cudnn import library as asked
from pytest_torchmem.cudnn.library import Library, library
from pytest_torchmem.cudnn.questions import AttentionQuestion, Question
from pytest_torchmem.targets.gpus import find_gpu

MODELS = """
    alexnet vgg11_bn vgg16 resnet18 resnet34 resnet50 resnet101 wide_resnet50_2 resnext50_32x4d
    resnext101_32x8d densenet121 densenet161 squeezenet1_0 squeezenet1_1 mobilenet_v2
    mobilenet_v3_small mobilenet_v3_large mnasnet0_5 mnasnet1_0 shufflenet_v2_x1_0
    efficientnet_b0 efficientnet_b3 efficientnet_v2_s regnet_y_400mf regnet_x_1_6gf
    convnext_tiny convnext_base googlenet inception_v3 maxvit_t
""".split()  # noqa: SIM905
GPUS = ("t4", "a100", "rtx-4090", "h100", "b200")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = (torch.contiguous_format, torch.channels_last)


class Recorder:
    """Stands for cuDNN in a trace, and notes what it is asked; it answers nothing."""

    def __init__(self, library: Library) -> None:
        self.version = library.version
        self.questions: dict[Question, None] = {}
        self._library = library

    def ask(self, capability: tuple[int, int], multiprocessors: int, question: Question) -> Any:
        """Note a question and return cuDNN's answer."""
        self.questions[question] = None
        return self._library.ask(capability, multiprocessors, question)


def questions_of(name: str, recorder: Recorder) -> int:
    """Trace a model's step in all types and layouts; return how many images a batch has."""
    import torchvision

    asked.library = lambda: recorder  # type: ignore[assignment,return-value]
    size, batch = (299 if name == "inception_v3" else 224), 8
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    for dtype in DTYPES:
        for memory_format in FORMATS:
            with torch.device("meta"):
                images = torch.empty(batch, 3, size, size, dtype=dtype)
                images = images.contiguous(memory_format=memory_format)
            model = getattr(torchvision.models, name)(**options)  # some need values to be made
            model = model.to("meta").to(dtype=dtype, memory_format=memory_format)
            trace(model, images, device="cuda", gpu="h100", memory="unlimited", loss_fn=_sum)
    return batch


def _sum(output: Any) -> torch.Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return sum(one.float().sum() for one in outputs if one is not None)


def _dtype(question: Question) -> str:
    if isinstance(question, AttentionQuestion):
        return dict(question.operands)["query"].dtype
    return question.x.dtype


def processor_seconds(found: Library) -> float:
    """Return the processor time that cuDNN's process has used."""
    process = found._process
    if process is None or process._popen is None:
        return 0.0
    fields = Path(f"/proc/{process._popen.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(found: Library, path: Path) -> None:
    """Print how many answers are those that the same cuDNN gave with a GPU (an H100)."""
    equal = near = count = 0
    for question, _, recorded in recorded_convolutions(path):
        told = found.ask((9, 0), 132, question).workspace
        count += 1
        if told is not None:
            equal += told == recorded
            near += abs(told - recorded) <= max(1024, 0.05 * recorded)
    print(f"{found!r}: of {count} workspaces {equal} equal, {near} within 5 % or 1 KiB")


def main() -> None:
    """Print a row for each model, and what came of it in all."""
    found = library()
    if isinstance(found, str):
        sys.exit(found)
    if sys.argv[1:2] == ["--recorded"]:
        compare(found, Path(sys.argv[2]))
        return
    rows, why, engines = [], Counter[str](), Counter[int]()
    total = unanswered = 0
    clock = spent = 0.0
    for name in sys.argv[1:] or MODELS:
        recorder = Recorder(found)
        questions_of(name, recorder)
        largest = dict.fromkeys(GPUS, 0)
        questions = missing = 0
        before, began = processor_seconds(found), time.perf_counter()
        for gpu in map(find_gpu, GPUS):
            for question in recorder.questions:
                if _dtype(question) == "bfloat16" and gpu.capability < (8, 0):
                    continue  # ATen's own kernels take it
                answer = found.ask(gpu.capability, gpu.multiprocessors, question)
                questions += 1
                if answer.workspace is None:
                    missing += 1
                    why[f"{gpu.name}, {_dtype(question)}: {answer.why}"] += 1
                else:
                    short = "a100" if gpu.name.startswith("a100") else gpu.name
                    largest[short] = max(largest[short], answer.workspace)
                    engines[answer.plans[0].engine] += 1
        clock += time.perf_counter() - began
        spent += processor_seconds(found) - before
        total, unanswered = total + questions, unanswered + missing
        mib = [f"{nbytes / 2**20:,.0f}" for nbytes in largest.values()]
        rows.append((name, len(recorder.questions), missing, *mib))
        print(rows[-1], flush=True)
    headers = ("model", "convolutions", "unanswered", *(f"{gpu}, MiB" for gpu in GPUS))
    print(tabulate(rows, headers=headers))
    print(f"{total:,} questions, {unanswered:,} without an answer: {dict(why)}")
    print(f"engines: {dict(engines.most_common())}")
    print(f"{1e3 * spent / total:.2f} ms of processor time, {1e3 * clock / total:.2f} ms each")
    began = time.perf_counter()
    for question in recorder.questions:
        found.ask((9, 0), 132, question)
    again = (time.perf_counter() - began) / len(recorder.questions)
    print(f"{1e6 * again:.1f} µs for one that is remembered")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        main()
