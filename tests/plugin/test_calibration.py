"""Updates measure what no formula gives where there is a GPU, and checks without one use it."""

from typing import Any

import pytest

from pytest_torchmem.snapshots.calibration import read_calibration_file
from pytest_torchmem.targets.gpus import Setup, WorkspaceKey, find_gpu
from pytest_torchmem.targets.gpus import WorkspaceSize as Size
from pytest_torchmem.torch_private.names import TORCH_SERIES
from pytest_torchmem.units import format_size
from tests.measurement.stand_in import StandIn
from tests.plugin.conftest import CONVOLUTIONS, DOUBLE, Project, Result, checking

MIB = 1024**2
FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"
SETUP = Setup("a100-80gb", TORCH_SERIES, "9.19.0")
ONE = checking("net(), image()", head="from model import *\n")
SMALL = checking('net(), image(), device="cuda"', name="small", head="from model import *\n")
TWO = SMALL + checking('net(8), image(), device="cuda"', name="wide")
BODY = """
from model import *

@pytest.fixture
def model():
    return net()

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_it(model):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)(image().to(device)).sum().backward()
"""
CALLED = 'torchmem.check(net(), image(), device="cuda"'
NO_TOLERANCE = ("--torchmem-measure-tolerance=100%",)
NONE = StandIn(why_not="there is no CUDA device here")


@pytest.fixture
def project(project: Project) -> Project:
    project.write(model=CONVOLUTIONS, test_net=ONE)
    return project


@pytest.fixture
def gpu(there_is: Any) -> StandIn:
    """A GPU like the default one of traces, whose convolutions take 5 and 9 MiB."""
    found = there_is(StandIn())
    found.workspaces = {FORWARD: 5 * MIB, BACKWARD: 9 * MIB}
    return found


def run(project: Project, *options: str, **given: int | str) -> tuple[Result, dict[str, Any]]:
    """Run the tests; return the result and the JSON report's check on cuda of each test."""
    result, checks = project.checks(*options, **given)
    on_cuda = (check for check in checks if check["device"] == "cuda")
    return result, {check["nodeid"].partition("::")[2]: check for check in on_cuda}


def by_operator(project: Project) -> dict[str, Size]:
    found = project.calibration()
    assert list(found) == [SETUP]
    return {question.operator: figure for question, figure in found[SETUP].items()}


def test_an_update_measures_and_traces_without_a_gpu_use_it(project, gpu, there_is):
    result, checks = run(project, "--torchmem-update", passed=1)
    assert by_operator(project) == {FORWARD: Size(5 * MIB), BACKWARD: Size(9 * MIB)}
    result.tells("wrote __torchmem__/gpu-calibration.json: 2 new")
    # The snapshot of the same update stands on the figures, and so do the traces after it.
    with_gpu = checks["test_it"]
    assert with_gpu["calibrated_workspaces"] == [FORWARD, BACKWARD]
    assert with_gpu["unknown_workspaces"] == with_gpu["warnings"] == []
    assert with_gpu["workspaces"]["calibrated"] == 9 * MIB
    assert abs(with_gpu["measurement"]["figures"]["peak"] - with_gpu["figures"]["peak"]) < 1024
    there_is(NONE)
    result, checks = run(project, "--torchmem-strict", passed=1)
    assert checks["test_it"]["figures"] == with_gpu["figures"]
    result.stdout.no_fnmatch_line("*unknown bytes*")


def test_reports_say_what_is_measured_and_what_is_unknown(project: Project, gpu: StandIn) -> None:
    result, checks = run(project, "--torchmem-update", "--torchmem-measure=never")
    assert checks["test_it"]["unknown_workspaces"] == [FORWARD, BACKWARD]
    result.tells("warnings: *(aten::convolution, *), figures may be too low*")
    run(project, "--torchmem-update")
    files = ("--torchmem-markdown=report.md", "--junitxml=report.xml")
    result, checks = run(project, "-v", *files)
    result.stdout.no_fnmatch_line("*unknown bytes*")
    result.tells(f"calibrated workspace: {FORWARD}: test_net.py::test_it")
    told = project.read("report.md")
    assert "1 check uses calibrated (GPU-measured) workspace for" in told
    assert f": `{FORWARD}`, `{BACKWARD}`." in told
    assert "too low" not in told
    junit = project.read("report.xml")
    assert f'name="torchmem.cuda.calibrated_workspaces" value="{FORWARD}, {BACKWARD}"' in junit
    assert "unknown_workspaces" not in junit
    project.file("gpu-calibration").unlink()
    run(project, "--torchmem-measure=never", *files)
    told = project.read("report.md")
    assert f"may be too low, by the workspace of: `{FORWARD}`" in told
    assert "calibrated" not in told
    assert "unknown_workspaces" in project.read("report.xml")
    run(project, "--torchmem-update")
    marker = '@pytest.mark.memory_budget("1 MiB", device="cuda")\n'
    result, _ = run(project, test_net=ONE.replace("def", f"{marker}def"))
    result.tells("*9.00 MiB *workspace: aten::convolution_backward*")


def test_whole_bodies_are_calibrated_too(project: Project, gpu: StandIn) -> None:
    _, checks = run(project, "--torchmem-update", *NO_TOLERANCE, test_net=BODY, passed=1)
    assert by_operator(project) == {FORWARD: Size(5 * MIB), BACKWARD: Size(9 * MIB)}
    assert checks["test_it"]["calibrated_workspaces"] == [FORWARD, BACKWARD]


def test_the_fixtures_own_traces_take_it(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update")
    traces = "    profile = torchmem.trace(net(), image(), device='cuda')\n"
    calibrated = "    assert profile.by_confidence()['calibrated'] == 9 * 1024**2\n"
    run(project, test_net=ONE + traces + calibrated, passed=1)


# Of a worker's run only the way of its figures is of interest: the profiler is the double's, and
# what the GPU says follows from the test.
ANSWERS = """
from pytest_torchmem.checks.gpu import CalibrationResult, Calibrations
from pytest_torchmem.targets.gpus import WorkspaceSize, WorkspaceKey, Setup

def measure(self, module, target):
    size = target.trace("cuda", None, None).peak
    one, other = WorkspaceKey("aten::b", f"[{size}]"), WorkspaceKey("aten::a", "")
    sizes = {one: WorkspaceSize(size, 7), other: WorkspaceSize(size)}
    return CalibrationResult({Setup("h100", "2.13"): sizes})

Calibrations.measure = measure
"""


def test_with_workers_the_controller_writes(light: Project) -> None:
    light.write(conftest=DOUBLE + ANSWERS, test_net=checking("n", over="[30, 10, 20]"))
    light.run_apart("-n2", "--torchmem-update", passed=3)
    text = light.file("gpu-calibration").read_bytes()
    light.file("gpu-calibration").unlink()
    light.run_apart("--torchmem-update", passed=3)
    assert light.file("gpu-calibration").read_bytes() == text
    assert light.calibration() == {
        Setup("h100", "2.13"): {
            WorkspaceKey("aten::a", ""): Size(60),  # of several the largest
            **{WorkspaceKey("aten::b", f"[{size}]"): Size(size, 7) for size in (20, 40, 60)},
        }
    }


def test_runs_that_measure_nothing_and_a_dry_run_write_nothing(project, gpu):
    run(project, "--torchmem-update", "--torchmem-measure=never", passed=1)
    assert gpu.calls == []
    run(project)  # is no update
    assert not project.file("gpu-calibration").exists()
    result, _ = run(project, "--torchmem-dry-run")
    result.fails("would write __torchmem__/gpu-calibration.json: 2 new")
    assert not project.file("gpu-calibration").exists()


def test_a_failed_test_leaves_no_figures(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update", test_net=TWO + "    assert False\n", passed=1, failed=1)
    geometries = [question.geometry for question in project.calibration()[SETUP]]
    assert len(geometries) == 2
    assert all("float32[4,3,3,3]" in geometry for geometry in geometries)  # of the other test


def test_what_does_not_fit_is_not_calibrated(project: Project, gpu: StandIn) -> None:
    gpu.others = gpu.gpu().memory - 1024
    result, _ = run(project, "--torchmem-update", passed=1)
    result.tells("not calibrated: test_net.py::test_it: needs *")
    assert not project.file("gpu-calibration").exists()


def test_what_did_not_run_as_in_the_trace_is_named(project: Project, gpu: StandIn) -> None:
    project.write(test_net=ONE.replace("net()", "nn.Sequential(net(), nn.BatchNorm2d(4))"))
    result, checks = run(project, "--torchmem-update", *NO_TOLERANCE, passed=1)
    result.tells("not calibrated: *::test_it: on the GPU, aten::cudnn_batch_norm*did not run with*")
    assert checks["test_it"]["unknown_workspaces"] == []  # of a batch norm there is a bound


def test_a_calibration_of_the_tests_own_is_taken_as_it_is(project: Project, gpu: StandIn) -> None:
    own = CALLED + ", calibration=pytest_torchmem.Calibration({})"
    project.write(test_net=f"import pytest_torchmem\n{TWO.replace(CALLED, own)}")
    _, checks = run(project, "--torchmem-update", *NO_TOLERANCE, passed=2)
    assert checks["test_small"]["unknown_workspaces"]
    assert len(project.calibration()[SETUP]) == 2  # of the other test


def test_modes_of_an_update(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update")
    gpu.workspaces = {FORWARD: 6 * MIB, BACKWARD: 6 * MIB}
    run(project, "--torchmem-update=new")
    assert by_operator(project)[FORWARD] == Size(5 * MIB)
    result, _ = run(project, "--torchmem-update=changed")
    assert by_operator(project) == {FORWARD: Size(6 * MIB), BACKWARD: Size(6 * MIB)}
    result.tells("wrote __torchmem__/gpu-calibration.json: 2 changed")
    result, _ = run(project, "--torchmem-update")
    result.stdout.no_fnmatch_line("wrote *")


def test_of_another_gpu_figures_are_recorded_for_that_one(project: Project, there_is: Any) -> None:
    there_is(StandIn("h100")).workspaces = {FORWARD: 5 * MIB, BACKWARD: 9 * MIB}
    _, checks = run(project, "--torchmem-update", passed=1)
    assert [setup.gpu for setup in project.calibration()] == ["h100"]
    # The trace for the default GPU takes none of it, and the one for the h100 does.
    assert checks["test_it"]["unknown_workspaces"] == [FORWARD, BACKWARD]
    found = checks["test_it"]["measurement"]
    assert abs(found["estimate"]["peak"] - found["figures"]["peak"]) < 1024
    there_is(NONE)
    _, checks = run(project, "--torchmem-gpu=h100", "--torchmem-update")
    assert checks["test_it"]["calibrated_workspaces"] == [FORWARD, BACKWARD]


def test_two_directories_have_their_own(project: Project, gpu: StandIn, there_is: Any) -> None:
    (project.path / "test_net.py").unlink()
    for name in ("one", "other"):
        project.pytester.mkdir(name)
        (project.path / name / f"test_{name}.py").write_text(ONE)
    run(project, "--torchmem-update", passed=2)
    path = project.path / "other" / "__torchmem__" / "gpu-calibration.json"
    assert read_calibration_file(path).entries
    path.write_text(_resized(path.read_text(), 9, 19))
    there_is(NONE)
    _, checks = project.checks()
    peaks = {one["nodeid"]: one["figures"]["backward_peak"] for one in checks if one["gpu"]}
    one, other = (peaks[test] for test in sorted(peaks))
    assert other - one == 10 * MIB


def _resized(text: str, before: int, now: int) -> str:
    """Write other sizes, in MiB, as numbers and for people."""
    for size in (lambda mib: str(mib * MIB), lambda mib: format_size(mib * MIB)):
        text = text.replace(size(before), size(now))
    return text


def test_a_broken_file_fails_the_checks_and_stays(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update")
    broken = project.file("gpu-calibration").read_text().replace("setups", "figures")
    project.file("gpu-calibration").write_text(broken)
    for options in ((), ("--torchmem-update",)):
        result, _ = run(project, *options, failed=1)
        result.tells("*gpu-calibration.json: is not a calibration: it has no list*")
        assert project.file("gpu-calibration").read_text() == broken


def test_a_merge_conflict_is_settled_on_a_gpu(project, gpu, there_is):
    run(project, "--torchmem-update")
    text = project.file("gpu-calibration").read_text()
    line = next(line for line in text.splitlines() if str(5 * MIB) in line)
    ours, theirs = line, _resized(line, 5, 8)
    conflict = f"<<<<<<< ours\n{ours}\n=======\n{theirs}\n>>>>>>> theirs"
    project.file("gpu-calibration").write_text(text.replace(line, conflict))
    there_is(NONE)
    for options in ((), ("--torchmem-update",)):
        result, _ = run(project, *options, failed=1)
        result.tells("*has an unresolved merge conflict*")
    there_is(gpu)
    run(project, "--torchmem-update", passed=1)
    assert project.file("gpu-calibration").read_text() == text


def test_figures_nobody_asks_for_go_with_an_update_of_the_directory(project, gpu, there_is):
    run(project, "--torchmem-update", test_net=TWO)
    assert len(project.calibration()[SETUP]) == 4
    with project.unchanged("gpu-calibration"):
        there_is(NONE)
        project.write(test_net=TWO.partition("def test_wide")[0] + "def test_other(): pass")
        for part in (("-k", "test_small"), ("test_net.py",), ("test_net.py::test_small",)):
            run(project, "--torchmem-update", *part)
        run(project, "--torchmem-update=new")
        run(project)
    # A GPU is needed to measure; to see that nobody asks, none is.
    result, _ = run(project, "--torchmem-update")
    result.tells("wrote __torchmem__/gpu-calibration.json: 2 obsolete")
    assert len(project.calibration()[SETUP]) == 2


def test_a_skipped_test_may_still_ask(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update", test_net=TWO)
    project.write(test_net=TWO.replace("def test_wide", "@pytest.mark.skip\ndef test_wide"))
    run(project, "--torchmem-update", passed=1, skipped=1)
    assert len(project.calibration()[SETUP]) == 4


def test_other_gpus_figures_stay(project: Project, gpu: StandIn, there_is: Any) -> None:
    h100 = there_is(StandIn("h100"))
    run(project, "--torchmem-update")
    assert h100.gpu() == find_gpu("h100")
    there_is(gpu)
    run(project, "--torchmem-update")
    assert sorted(setup.gpu for setup in project.calibration()) == ["a100-80gb", "h100"]


def test_the_file_goes_with_its_last_figure(project: Project, gpu: StandIn, there_is: Any) -> None:
    run(project, "--torchmem-update")
    project.write(test_net=ONE.replace("net()", "nn.Linear(32, 4)"))
    result, _ = run(project, "--torchmem-update", *NO_TOLERANCE, passed=1)
    assert not project.file("gpu-calibration").exists()
    result.tells("removed __torchmem__/gpu-calibration.json: 2 obsolete")


def test_without_memory_tests_nobody_asks(project: Project, gpu: StandIn) -> None:
    run(project, "--torchmem-update")
    run(project, "--torchmem-update=new", test_net="def test_other():\n    pass\n")
    assert project.file("gpu-calibration").exists()
    result, _ = run(project, "--torchmem-update=obsolete")
    result.tells("removed __torchmem__/gpu-calibration.json: 2 obsolete")
    assert not project.file("gpu-calibration").parent.exists()
