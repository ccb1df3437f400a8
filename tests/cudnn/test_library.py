"""The process that asks cuDNN, what it answers and what is remembered of that."""

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.truth.recording import recorded_convolutions
from pytest_torchmem.cudnn import driver
from pytest_torchmem.cudnn import library as asked
from pytest_torchmem.cudnn.driver import device_properties
from pytest_torchmem.cudnn.library import DiskMemory, Library
from pytest_torchmem.cudnn.questions import (
    VARIABLE,
    Answer,
    AttentionQuestion,
    ConvolutionQuestion,
    ExecutionPlan,
    Installed,
    Operand,
    contiguous_strides,
    find_installed,
    parse_version,
    without_free_strides,
)

A100 = (8, 0), 108
LINUX = sys.platform == "linux" and driver.is_supported()


def layer(dtype: str = "float16", batch: int = 2, **settings: bool) -> ConvolutionQuestion:
    """Return the forward of a layer of 64 filters of 3 x 3."""

    def dense(*shape: int) -> Operand:
        return Operand(dtype, shape, contiguous_strides(shape))

    x, w, y = dense(batch, 64, 8, 8), dense(64, 64, 3, 3), dense(batch, 64, 8, 8)
    return ConvolutionQuestion("forward", x, w, y, (1, 1), (1, 1), (1, 1), **settings)


def test_a_question_as_text() -> None:
    question = layer(deterministic=True, allow_tf32=False)
    assert question.operator == "cudnn::convolution_forward"
    assert question.geometry == (
        "float16[2,64,8,8], float16[64,64,3,3], float16[2,64,8,8], [1,1], [1,1], [1,1]; "
        "deterministic"  # TF32 is of float32 alone
    )
    assert layer("float32", allow_tf32=False).geometry.endswith("; float32 as ieee")
    strided = Operand("float16", (2, 3), (1, 2), alignment=16)
    assert str(strided) == "float16[2,3]@1:2 aligned to 16"


def test_products_of_matrices_on_hopper_are_those_that_an_h100_took() -> None:
    recorded = Path(__file__).parents[2] / "benchmarks" / "truth" / "recorded" / "h100"
    products = as_recorded = 0
    for question, engine, workspace in recorded_convolutions(recorded):
        answer = asked._matrix_product((9, 0), question)
        if answer is not None:
            plan = answer.plans[0]
            products += 1
            as_recorded += plan.engine == engine and abs(plan.workspace - workspace) < 1024
        assert asked._matrix_product((8, 0), question) is None
    assert (products, as_recorded) == (337, 322)


def test_strides_of_single_elements_follow_from_the_others() -> None:
    assert without_free_strides((2, 4, 1, 8), (99, 8, 77, 1), False) == (99, 8, 8, 1)
    assert without_free_strides((2, 4, 1, 8), (32, 1, 77, 4), True) == (32, 1, 32, 4)
    assert without_free_strides((1, 1, 1, 1), (5, 6, 7, 8), False) == (1, 1, 1, 1)


@pytest.mark.skipif(not LINUX, reason="shared objects are written for Linux")
def test_the_stand_in_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / driver.SONAME
    path.write_bytes(driver.shared_object())
    stand_in = ctypes.CDLL(str(path))
    for name, answer in driver.FUNCTIONS.items():
        handle = ctypes.c_uint64(0)
        assert getattr(stand_in, name)(ctypes.byref(handle)) == max(answer, 0), name
        assert bool(handle.value) == (answer == driver.HANDLE), name


def test_a_stand_in_for_each_machine() -> None:
    known = {machine: driver.shared_object(machine=machine) for machine in ("x86_64", "aarch64")}
    assert {written[:4] for written in known.values()} == {b"\x7fELF"}
    assert all(len(written) < 4096 for written in known.values())
    assert not driver.is_supported("riscv64")
    with pytest.raises(KeyError):
        driver.shared_object(machine="riscv64")


def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMEM_CUDNN", "off")
    assert find_installed() == "TORCHMEM_CUDNN is off"
    monkeypatch.setenv("TORCHMEM_CUDNN", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert "there is no libcudnn.so.9 of a known version in it" in str(find_installed())
    (tmp_path / "libcudnn.so.9.24.1").touch()
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.24.1")
    linked = find_installed()
    assert isinstance(linked, Installed)
    assert linked.version == (9, 24, 1)
    (tmp_path / "libcudnn.so.9").unlink()
    root = tmp_path / "nvidia" / "cudnn"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "libcudnn.so.9").touch()
    (root / "include").mkdir()
    header = root / "include" / "cudnn_version.h"
    header.write_text("#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 5\n#define CUDNN_PATCHLEVEL 1\n")
    assert find_installed() == "cuDNN 9.5.1 does not answer without a GPU: 9.8.0 and later do"
    header.write_text(header.read_text().replace("MINOR 5", "MINOR 20"))
    found = find_installed()
    assert isinstance(found, Installed)
    assert (found.version, found.folders[0]) == ((9, 20, 1), root / "lib")
    monkeypatch.setenv("TORCHMEM_CUDNN", "")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere")])
    assert "pip install nvidia-cudnn-cu13" in str(find_installed())
    monkeypatch.setattr(sys, "platform", "win32")
    assert "on Linux alone" in str(find_installed())


def test_versions_as_text() -> None:
    assert parse_version("9.20.0") == (9, 20, 0)
    assert parse_version("") == parse_version("9.x.0") == (0, 0, 0)


def test_answers_are_remembered_on_disk(cache: Path) -> None:
    place = ("8.0x108", "cudnn::convolution_forward", "float16[1]")
    answer = Answer((ExecutionPlan(16, 22, ("tensor core",)), ExecutionPlan(32, 45)))
    assert answer.workspace == 32
    assert Answer(why="none").workspace is None
    first = DiskMemory((9, 20, 0))
    assert first.get(place) is None
    first.add(place, answer)
    first.add((*place[:2], "float16[2]"), Answer(why="no engine"))
    (file,) = cache.rglob("*.jsonl")
    with file.open("a") as lines:
        lines.write('["8.0x108","half a li')
    again = DiskMemory((9, 20, 0))
    assert again.get(place) == answer
    assert again.get((*place[:2], "float16[2]")) == Answer(why="no engine")
    assert DiskMemory((9, 26, 0)).get(place) is None


def test_nothing_fails_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    memory = DiskMemory((9, 20, 0))
    memory.add(("", "", ""), Answer(why="x"))
    assert memory.get(("", "", "")) == Answer(why="x")


@pytest.mark.skipif(not LINUX, reason="cuDNN is asked on Linux")
def test_a_cudnn_that_cannot_be_loaded(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "libcudnn.so.9"
    path.write_bytes(b"no library")
    broken = Library(Installed(path, (9, 20, 0), (tmp_path,)))
    for batch in range(1, 6):
        answer = broken.ask(*A100, layer(batch=batch))
        assert answer.workspace is None
        assert answer.why.startswith("cuDNN cannot be loaded: ")
    assert broken._failures == 3  # it is not tried for ever
    assert not list(cache.rglob("*.jsonl"))


def answering(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> Library:
    """Return a cuDNN whose process runs ``code`` after it has said its version."""
    version = "import sys, os, time\nprint('{\"version\": [9, 20, 0]}', flush=True)\n"
    monkeypatch.setattr(asked, "_START", version + code)
    return Library(Installed(folder / "libcudnn.so.9", (9, 20, 0), (folder,)))


ANSWER = 'print(\'{"plans": [[7, 1, []]], "why": ""}\', flush=True)\n'


def test_a_process_that_dies_is_replaced(tmp_path, cache, monkeypatch):
    code = f"for line in sys.stdin:\n    if 'bfloat16' in line: os._exit(11)\n    {ANSWER}"
    dying = answering(monkeypatch, tmp_path, code)
    assert dying.ask(*A100, layer()).workspace == 7
    answer = dying.ask(*A100, layer("bfloat16"))
    why = "cuDNN did not answer: its process ended with status 11"
    assert answer == Answer(why=why, is_failure=True)
    assert dying.ask(*A100, layer(batch=3)).workspace == 7
    assert dying.ask(*A100, layer("bfloat16")) is answer  # it is not tried again
    (file,) = cache.rglob("*.jsonl")
    assert "bfloat16" not in file.read_text()  # and in another run it is


def test_a_process_that_others_end_is_asked_again(tmp_path, cache, monkeypatch):
    """Such as by the system, for want of memory."""
    code = f"sys.stdin.readline()\nif os.path.exists({str(tmp_path / 'again')!r}): {ANSWER}"
    code += f"open({str(tmp_path / 'again')!r}, 'w')"
    assert answering(monkeypatch, tmp_path, code).ask(*A100, layer()).workspace == 7


def test_a_library_that_ends_every_process_is_given_up(tmp_path, cache, monkeypatch):
    ending = answering(monkeypatch, tmp_path, "sys.stdin.readline()")
    started = Counter[str]()
    ask = Library._asked

    def counted(self: Library, message: str) -> Answer | None:
        started["asked"] += self._deaths < asked._DEATHS
        return ask(self, message)

    monkeypatch.setattr(asked, "_DEATHS", 2)
    monkeypatch.setattr(Library, "_asked", counted)
    whys = {ending.ask(*A100, layer(batch=batch)).why for batch in range(1, 6)}
    assert whys == {"cuDNN did not answer: its process ended with status 0"}
    assert started["asked"] == 4


def test_a_process_that_hangs_is_waited_for_once(tmp_path, cache, monkeypatch):
    hanging = answering(monkeypatch, tmp_path, "time.sleep(60)")
    monkeypatch.setattr(asked, "PATIENCE", 0.5)
    whys = {hanging.ask(*A100, layer(batch=batch)).why for batch in range(1, 6)}
    assert whys in (
        {"cuDNN did not answer: it took more than 0 seconds"},
        {"cuDNN cannot be loaded: it took more than 0 seconds"},  # Python took longer to start
    )


def test_an_interrupted_question_does_not_answer_the_next(tmp_path, cache, monkeypatch):
    code = "for line in sys.stdin:\n    " + ANSWER.replace("7", "' + str(len(line)) + '")
    library = answering(monkeypatch, tmp_path, code)
    first = library.ask(*A100, layer()).workspace
    read = asked._Process._read
    monkeypatch.setattr(asked._Process, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        library.ask(*A100, layer(batch=1000))
    monkeypatch.setattr(asked._Process, "_read", read)
    assert library.ask(*A100, layer(batch=3)).workspace == first


def interrupted(_: object) -> None:
    raise KeyboardInterrupt


def test_a_version_that_is_not_the_librarys_own(tmp_path, cache, monkeypatch):
    """Answers would be kept under the wrong one."""
    library = answering(monkeypatch, tmp_path, ANSWER)
    library.installed = library.installed._replace(version=(9, 26, 0))
    assert "it is [9, 20, 0], and named as 9.26.0" in library.ask(*A100, layer()).why


def test_lines_that_are_no_answers(cache: Path) -> None:
    place = ("8.0x108", "cudnn::convolution_forward", "float16[1], [1,1]")
    DiskMemory((9, 20, 0)).add(place, Answer((ExecutionPlan(16, 22),)))
    (file,) = cache.rglob("*.jsonl")
    good = file.read_text()
    assert DiskMemory((9, 20, 0)).get(place) is not None
    for plans in ("[[-1,22,[]]]", "[[Infinity,22,[]]]", '[["16",22,[]]]', "[" * 100_000, "[[1]]"):
        file.write_text(good.partition('",[')[0] + f'",{plans},""]\n\x00\n[]\n{{}}\n')
        assert DiskMemory((9, 20, 0)).get(place) is None
    file.unlink()
    file.mkdir()
    assert DiskMemory((9, 20, 0)).get(place) is None


def test_devices_that_are_not_listed() -> None:
    assert device_properties((8, 7), 16)["deviceVer"] == 870
    assert device_properties((5, 0), 16)["maxThreadsPerSM"] == 2048
    assert len(device_properties((9, 0), 132)) == 24


def test_a_process_without_torch(cudnn: Library) -> None:
    assert cudnn.ask(*A100, layer()).workspace is not None
    process = cudnn._process
    maps = Path(f"/proc/{process._popen.pid}/maps").read_text()
    assert "libcudnn_graph.so.9" in maps
    assert "libtorch" not in maps
    if torch.version.cuda is None:  # a build for CUDA loads a cuDNN of its own
        assert "libcudnn" not in Path("/proc/self/maps").read_text()


def test_answers_of_cudnn(cudnn: Library) -> None:
    """Contiguous half precision goes through channels last: copies of x, w and y, and 16 bytes."""
    x = y = 2 * 32 * 64 * 56 * 56
    w = 2 * 64 * 64 * 3 * 3
    shape = (32, 64, 56, 56)
    image = Operand("float16", shape, contiguous_strides(shape))
    plain = ConvolutionQuestion("forward", image, layer().w, image, (1, 1), (1, 1), (1, 1))
    first = cudnn.ask(*A100, plain)
    assert first.workspace == x + w + y + 16
    assert len(first.plans) == 1
    tried = cudnn.ask(*A100, plain._replace(benchmark=True))
    assert len(tried.plans) > 5
    assert tried.plans[0] == first.plans[0]


def test_the_package_starts_no_process_and_imports_no_torch_for_it() -> None:
    asks = "import sys, pytest_torchmem.cudnn.library as library\nlibrary.library()\n"
    command = [sys.executable, "-c", f"{asks}assert 'torch' not in sys.modules\n"]
    subprocess.run(command, check=True, env={**os.environ, "TORCHMEM_CUDNN": ""})


def attention(direction: str, **settings: Any) -> AttentionQuestion:
    """Return attention over 2 x 16 heads of 1,024 rows of 64."""

    def dense(*shape: int, dtype: str = "bfloat16") -> Operand:
        return Operand(dtype, shape, contiguous_strides(shape))

    names = ["query", "key", "value", "output", *(["gradient"] if direction == "backward" else [])]
    operands = [(name, dense(2, 16, 1024, 64)) for name in names]
    operands.append(("statistics", dense(2, 16, 1024, 1, dtype="float32")))
    return AttentionQuestion(direction, tuple(operands), **settings)


def test_a_question_about_attention_as_text() -> None:
    question = attention("forward", causal=True, dropout=0.1)
    assert question.operator == "cudnn::attention_forward"
    assert question.geometry.startswith("query=bfloat16[2,16,1024,64], key=")
    assert question.geometry.endswith("statistics=float32[2,16,1024,1]; causal, dropout 0.1")


def test_attention_of_cudnn(cudnn: Library) -> None:
    """A backward sums the query's gradient in float, and has a number for each row."""
    if cudnn.installed.frontend is None:
        answer = cudnn.ask((9, 0), 132, attention("forward"))
        assert answer.why == "nvidia-cudnn-frontend is not installed"
        pytest.skip(answer.why)
    forward = cudnn.ask((9, 0), 132, attention("forward"))
    backward = cudnn.ask((9, 0), 132, attention("backward", causal=True))
    assert (forward.why, backward.why) == ("", "")
    assert forward.workspace <= 4096
    rows = 2 * 16 * 1024
    assert 0 <= backward.workspace - (rows * 64 * 4 + rows * 4) <= 4096


def test_a_plan_that_would_be_compiled_is_not(cudnn: Library) -> None:
    """A depthwise convolution in channels last; compiling its kernel takes half a second."""
    shape, strides = (8, 96, 14, 14), (96 * 14 * 14, 1, 14 * 96, 96)
    image = Operand("float16", shape, strides)
    weight = Operand("float16", (96, 1, 3, 3), (9, 1, 3, 1))
    asked = ConvolutionQuestion("forward", image, weight, image, (1, 1), (1, 1), (1, 1))
    cudnn.ask((9, 0), 132, layer())  # the libraries are loaded
    began = time.perf_counter()
    assert cudnn.ask((9, 0), 132, asked).why == ""
    assert time.perf_counter() - began < 0.2


REMEMBERS = """
import sys
from pytest_torchmem.cudnn.questions import Answer, ExecutionPlan
from pytest_torchmem.cudnn.library import DiskMemory
memory = DiskMemory((9, 20, 0))
for at in range(500):
    place = ('8.0x108', f'{sys.argv[1]}', f'float16[{at}], ' * 20)
    memory.add(place, Answer((ExecutionPlan(at, 1),)))
"""


def test_processes_that_ask_at_once(tmp_path: Path, cache: Path) -> None:
    """As two workers of pytest-xdist do: every line of the file is whole."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", REMEMBERS]
    running = [subprocess.Popen([*command, name], env=environment) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    found = DiskMemory((9, 20, 0))
    for name in "ab":
        for at in range(500):
            answer = found.get(("8.0x108", name, f"float16[{at}], " * 20))
            assert answer.workspace == at


TEST = """
import torch
from torch import nn

def test_stem(torchmem):
    stem = nn.Conv2d(3, 64, 7, stride=2, padding=3)
    torchmem.check(stem, torch.empty(8, 3, 224, 224), device="cuda", gpu="a100", backward=False)
"""


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch, cache: Path) -> dict[str, str]:
    """The folders of both versions; the test is skipped where one of them is missing."""
    found = {}
    for name, wanted in (("EARLIER", (9, 10, 2)), ("LATER", (9, 20, 0))):
        found[name] = os.environ.get(f"{VARIABLE}_{name}", "")
        if not found[name]:
            pytest.skip(f"{VARIABLE}_{name} names no folder")
        monkeypatch.setenv(VARIABLE, found[name])
        installed = find_installed()
        assert isinstance(installed, Installed), installed
        assert installed.version == wanted
    return found


def test_an_upgrade_of_cudnn(pytester, monkeypatch, versions):
    """ResNet's first layer in float32 on an A100: 9.10.2 (torch 2.8 to 2.10) convolves it as it is,
    and 9.20.0 (torch 2.12 and 2.13) copies the output. ``TORCHMEM_CUDNN_EARLIER`` and
    ``TORCHMEM_CUDNN_LATER`` are folders that pip installed ``nvidia-cudnn-cu12==9.10.2.21`` and
    ``nvidia-cudnn-cu13==9.20.0.48`` into.
    """
    pytester.makepyfile(test_net=TEST)
    monkeypatch.setenv(VARIABLE, versions["EARLIER"])
    pytester.runpytest_subprocess("--torchmem-update").assert_outcomes(passed=1)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    monkeypatch.setenv(VARIABLE, "off")  # CI, without cuDNN
    pytester.runpytest_subprocess("--torchmem-strict").assert_outcomes(passed=1)
    monkeypatch.setenv(VARIABLE, versions["LATER"])
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    told = "*The stored workspaces were told by cuDNN 9.10.2, and those of this run*"
    result.stdout.fnmatch_lines(["*+29.06 MiB (+99.5 %) forward peak*", told, "*by cuDNN 9.20.0*"])
    pytester.runpytest_subprocess("--torchmem-update").assert_outcomes(passed=1)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
