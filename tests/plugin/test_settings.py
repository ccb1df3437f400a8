"""Every option and every ini key does what it says, alone and one by one."""

import pytest

from pytest_torchmem.checks import DEFAULT_GPU
from pytest_torchmem.checks.request import Settings
from pytest_torchmem.figures import DEFAULT_TOLERANCE
from pytest_torchmem.plugin.settings import read_settings
from pytest_torchmem.plugin.start import header
from pytest_torchmem.snapshots.tolerance import BUILT_IN
from pytest_torchmem.targets import gpus as catalogue
from tests.plugin.conftest import Project

VALUES = {
    "devices": ("cuda", lambda s: s.devices, ("cuda",)),
    "gpu": ("H100", lambda s: s.gpu, "h100"),
    "tolerance": ("3%", lambda s: _tolerance(s), "3%"),
    "update_max": ("15%", lambda s: str(s.update_max), "15%"),
    "json": ("out/r.json", lambda s: str(s.json_path)[-10:], "out/r.json"),
    "markdown": ("r.md", lambda s: str(s.markdown_path)[-4:], "r.md"),
    "proposal": ("there", lambda s: str(s.proposal_path)[-5:], "there"),
    "github": ("always", lambda s: s.on_github, True),
    "measure": ("require", lambda s: s.measure, "require"),
    "measure_tolerance": ("8%", lambda s: str(s.measure_tolerance), "8%"),
    "strict": ("true", lambda s: s.strict, True),
    "split_by_torch": ("true", lambda s: s.split_by_torch, True),
}
FLAGS = ("strict", "split_by_torch")


def _tolerance(settings: Settings) -> str:
    levels = settings.tolerances("tests/test_net.py")
    return str(next(rule for level in levels for rule in level).tolerance)


def _settings(pytester: pytest.Pytester, *options: str) -> Settings:
    config = pytester.parseconfigure(*options)
    try:
        return read_settings(config)
    finally:
        config._ensure_unconfigure()


def test_defaults(pytester):
    settings = _settings(pytester)
    assert settings.devices == ("cpu", "cuda")
    assert settings.gpu == DEFAULT_GPU == catalogue.DEFAULT_GPU
    assert _tolerance(settings) == DEFAULT_TOLERANCE == str(BUILT_IN[0].tolerance)
    assert not any([settings.update, settings.writes, settings.strict, settings.disabled])
    assert not any([settings.on_github, settings.json_path, settings.markdown_path])
    assert settings.proposal_path is settings.update_max is None
    assert (settings.measure, str(settings.measure_tolerance)) == ("auto", "5%")
    assert header("", settings) == header("", None), "the header of a run that sets nothing"


def test_every_option_defaults_to_none(pytester):
    config = pytester.parseconfig()
    names = [name for name in vars(config.option) if name.startswith("torchmem_")]
    assert len(names) == 22
    assert {name: getattr(config.option, name) for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("where", ["option", "pytest.ini", "[tool.pytest]", "option over ini"])
def test_one_by_one(pytester, name, where):
    value, read, expected = VALUES[name]
    assert read(_settings(pytester)) != expected
    option = f"--torchmem-{name.replace('_', '-')}"
    options = [option] if name in FLAGS else [f"{option}={value}"]
    if where == "pytest.ini":
        pytester.makefile(".ini", pytest=f"[pytest]\ntorchmem_{name} = {value}\n")
        options = []
    elif where == "[tool.pytest]":
        if pytest.version_tuple < (9,):
            pytest.skip("pytest 9 brought [tool.pytest]")
        literal = value if name in FLAGS else f'"{value}"'
        pytester.makepyprojecttoml(f"[tool.pytest]\ntorchmem_{name} = {literal}\n")
        options = []
    elif where == "option over ini":
        other = {"devices": "cpu", "gpu": "t4", "github": "never"}.get(name, "9%")
        other = "false" if name in FLAGS else other
        pytester.makefile(".ini", pytest=f"[pytest]\ntorchmem_{name} = {other}\n")
    assert read(_settings(pytester, *options)) == expected


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        (["--torchmem-update"], {"new", "changed", "obsolete"}),
        (["--torchmem-update=all"], {"new", "changed", "obsolete"}),
        (["--torchmem-update=new"], {"new"}),
        (["--torchmem-update=changed"], {"changed"}),
        (["--torchmem-update=obsolete"], {"obsolete"}),
        (["--torchmem-update=new", "--torchmem-update=obsolete"], {"new", "obsolete"}),
        (["--torchmem-dry-run"], {"new", "changed", "obsolete"}),
        (["--torchmem-dry-run", "--torchmem-update=new"], {"new"}),
    ],
)
def test_update_modes(pytester, options, modes):
    settings = _settings(pytester, *options)
    assert (settings.update, settings.writes) == (modes, "--torchmem-dry-run" not in options)


def test_update_does_not_swallow_the_path_after_it(pytester):
    pytester.makepyfile(test_it="def test_it(): pass")
    assert pytester.parseconfig("--torchmem-update", "test_it.py").args == ["test_it.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--torchmem-devices=gpu"], "*torchmem_devices: 'gpu' is not a device*"),
        (["--torchmem-gpu=h1000"], "*'h1000' is not a known GPU*h100*"),
        (["--torchmem-tolerance=much"], "*--torchmem-tolerance*'much' is not a tolerance*'2%'*"),
        (["--torchmem-update-max=x"], "*torchmem_update_max: 'x' is not a tolerance*"),
        (["--torchmem-github=maybe"], "*'maybe': write auto, always or never*"),
        (["--torchmem-update=some"], "*--torchmem-update*'some'*"),
    ],
)
def test_what_cannot_be_understood_ends_the_run_with_one_line(project, options, message):
    project.run(*options, test_it="def test_it(): pass").is_refused(message)


def test_ci_never_updates(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    result = project.run("--torchmem-update", test_it="def test_it(): pass")
    result.is_refused("*CI is set*CI never writes*")
    settings = _settings(project.pytester, "--torchmem-dry-run")
    assert (settings.in_ci, settings.writes) == (True, False)
    assert settings.proposal_path.name == "torchmem-proposal"


def test_header(project):
    line = "torchmem * | cpu, cuda (h100) | torch 2.* | tolerance 1% | updating (new)"
    project.run("--torchmem-gpu=h100", "--torchmem-update=new").tells(line)


def test_the_marker_and_a_check_have_several_gpus(project: Project) -> None:
    project.write(
        test_net="""
        import pytest, torch

        @pytest.mark.memory_budget("8 KiB", device="cuda", gpus=2)
        def test_body():
            assert torch.cuda.device_count() == 2
            torch.ones(1024, device="cuda:0"), torch.ones(4096, device="cuda:1")

        def program():
            torch.ones(1024, device=1), torch.ones(1024, device=torch.cuda.device_count() - 1)

        @pytest.mark.memory_budget("8 KiB", device="cuda")
        def test_check(torchmem):
            step = lambda: torch.ones(1, device="cuda").to("cuda:2", torch.double)
            profile = torchmem.check(step, gpus=3)["cuda"]
            assert profile.peak == 4
            assert profile.devices["cuda:2"].peak > 4
            assert torchmem.trace(program, gpus=2).devices["cuda:1"].peak == 2 * 4096
        """,
        test_none="""
        import pytest

        @pytest.mark.memory_budget("8 KiB", gpus=0)
        def test_none():
            pass
        """,
    )
    project.run("--continue-on-collection-errors", passed=2, errors=1).tells(
        "*memory_budget(gpus=): 0: write how many GPUs, from 1 to 64*"
    )
