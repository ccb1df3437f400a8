"""GPUs and operators that conftest files add for one run, and whose modules pytest rewrites."""

import sys

import pytest
import torch
from torch import Tensor

from pytest_torchmem.errors import UsageError
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.tracing.trace import trace

GPU = """
from pytest_torchmem import Gpu

def pytest_torchmem_register_gpus(config):
    return [Gpu("lab-1", "Lab GPU", (8, 9), 20 * 1024**3, 100, 1536)]
"""

USES_GPU = """
import pytest, torch
import pytest_torchmem

def test_by_the_fixture(torchmem):
    names = []
    torchmem.trace(lambda: names.append(torch.cuda.get_device_name()), device="cuda", gpu="Lab 1")
    assert names == ["Lab GPU"]

def test_by_the_function():
    pytest_torchmem.trace(lambda: None, device="cuda", gpu="lab-1")

@pytest.mark.memory_budget("1 MiB", device="cuda", gpu="lab-1")
def test_by_the_marker():
    torch.ones(4, device="cuda")
    assert torch.cuda.get_device_name() == "Lab GPU"
"""


@torch.library.custom_op("torchmem_hooks::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Run in a trace only where nobody has described it."""
    raise NotImplementedError("it was called")


OPERATORS = """
import torch
from pytest_torchmem import OperatorModel

def meta(x):
    return torch.empty_like(x)

def workspace(gpu, outputs, x):
    assert tuple(outputs.shape) == tuple(x.shape)
    return gpu.multiprocessors * 1024, 4096

def pytest_torchmem_register_operators(config):
    return [
        OperatorModel("torchmem_hooks::doubled", meta=meta, devices=("cpu",)),
        OperatorModel("torchmem_hooks::doubled", meta=meta, workspace=workspace, devices=("cuda",)),
    ]
"""

USES_OPERATOR = """
import torch

def test_it(torchmem):
    def body(device):
        torch.ops.torchmem_hooks.doubled(torch.ones(1024, device=device))

    assert torchmem.trace(lambda: body("cpu"), device="cpu").peak == 2 * 4096
    peak = torchmem.trace(lambda: body("cuda"), device="cuda", gpu="t4").peak
    assert peak == 2 * 4096 + 40 * 1024 + 4096
"""


def _lab_is_unknown() -> bool:
    with pytest.raises(UsageError, match="not a known GPU"):
        find_gpu("lab-1")
    return True


def test_a_gpu_is_there_for_one_run(project):
    project.run(conftest=GPU, test_net=USES_GPU, passed=3)
    assert _lab_is_unknown()
    result = project.run("--torchmem-gpu=lab-1", "--torchmem-devices=cuda", passed=3)
    result.tells("torchmem *cuda (lab-1)*")
    assert project.run("--torchmem-gpu=lab-1", conftest="").ret == pytest.ExitCode.USAGE_ERROR


def test_a_gpu_of_a_directory_below(project):
    below = project.path / "below" / "deeper"
    below.mkdir(parents=True)
    (below / "conftest.py").write_text(GPU)
    (below / "test_net.py").write_text(USES_GPU)
    project.run(passed=3)
    assert _lab_is_unknown()


def test_an_operator_is_described_for_one_run(project):
    project.run(conftest=OPERATORS, test_net=USES_OPERATOR, passed=1)
    with pytest.raises(NotImplementedError, match="it was called"):
        trace(lambda: torch.ops.torchmem_hooks.doubled(torch.ones(1024)))


def test_workers_add_what_they_are_given(project):
    test = """
from pytest_torchmem.targets.gpus import find_gpu
def test_it():
    assert find_gpu('Lab 1').product == 'Lab GPU'
"""
    project.run("-n1", "--torchmem-gpu=lab-1", conftest=GPU, test_net=test, passed=1)


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("gpus", "5", "returned 5: return a list"),
        ("gpus", "['h100']", "'h100' is not a pytest_torchmem.Gpu"),
        ("gpus", "[Gpu('h100', '', (9, 0), 1, 1, 1)]", "'h100' cannot be added: the name is taken"),
        ("operators", "'mine'", "returned 'mine': return a list"),
        ("operators", "[print]", "is not a pytest_torchmem.OperatorModel"),
        ("operators", "[OperatorModel('mylib::gone', meta=len)]", "there is no operator"),
        ("operators", "[OperatorModel('mm', meta=len)]", "not an operator's name"),
        ("operators", "[OperatorModel('aten::mm', meta=1)]", "meta=1 is not a function"),
        ("operators", "[OperatorModel('aten::mm', meta=len)] * 2", "described twice for cpu"),
        (
            "operators",
            "[OperatorModel('aten::mm', meta=len, devices='cuda')]",
            "devices='cuda': write ('cpu',), ('cuda',) or both",
        ),
    ],
)
def test_what_cannot_be_added_names_hook_and_plugin(project, hook, answer, message):
    name = f"pytest_torchmem_register_{hook}"
    hooks = "from pytest_torchmem import Gpu, OperatorModel\n"
    hooks += f"def {name}(config):\n    return {answer}\n"
    result = project.run(conftest=hooks, test_net="def test_it():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    error = "\n".join([*result.errlines, *result.outlines])
    assert f"the hook {name} of {project.path / 'conftest.py'}" in error
    assert message in error
    project.run(conftest="", passed=1)


def test_nothing_is_asked_where_nothing_runs(project):
    hook = "def pytest_torchmem_register_operators(config):\n    raise SystemError\n"
    result = project.run("--collect-only", conftest=hook, test_net="def test_it(): pass\n")
    assert result.ret == pytest.ExitCode.OK


_TEST = """
import sys
import a_plugin, pytest_torchmem.units
from pytest_torchmem.plugin import collection, hooks

def loader_of(module):
    return type(module.__spec__.loader).__name__

def test_loaders():
    for module in (pytest_torchmem.units, collection, hooks):
        assert loader_of(module) == "SourceFileLoader", module
    assert loader_of(sys.modules[__name__]) == loader_of(a_plugin) == "AssertionRewritingHook"
"""


def test_only_this_package_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(_TEST)
    pytester.makepyfile(a_plugin="")
    pytester.makeconftest("import pytest; pytest.register_assert_rewrite('a_plugin')")
    pytester.runpytest_subprocess("-p", "a_plugin").assert_outcomes(passed=1)


@pytest.mark.parametrize("options", [(), ("--assert=plain",), ("--no-such-option",)])
def test_what_finds_modules_is_as_before(pytester, options):
    pytester.makepyfile("def test_nothing(): pass")
    before = list(sys.meta_path)
    for _ in range(2):
        pytester.runpytest_inprocess(*options)
    assert sys.meta_path == before
