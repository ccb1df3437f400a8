"""The reference has every name that users can write."""

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pytest_torchmem
from pytest_torchmem import MemoryProfile, errors, measure, trace
from pytest_torchmem.checks import ARGUMENTS
from pytest_torchmem.cli import main
from pytest_torchmem.plugin import hookspec
from pytest_torchmem.plugin.fixture import Torchmem
from pytest_torchmem.plugin.start import add_options

PAGES = [
    Path(__file__).parents[1] / "docs" / name
    for name in ("reference.md", "reference-python.md", "reference-profile.md")
]
REFERENCE = "".join(page.read_text(encoding="utf-8") for page in PAGES)


def section(title: str) -> str:
    """Return the part below a heading that begins so, up to the next of its level."""
    found = re.search(rf"^(#+) {re.escape(title)}.*?$(.*?)(?=^\1 |\Z)", REFERENCE, re.M | re.S)
    assert found, title
    return found[2]


def named(text: str) -> set[str]:
    code = re.findall(r"`([^`\n]+)`", text)
    return {word for part in code for word in re.findall(r"[A-Za-z_][\w-]*", part)}


def parameters(function: Any) -> set[str]:
    every = inspect.signature(function).parameters.values()
    hidden = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {one.name for one in every if one.kind not in hidden} - {"self", "target"}


def options() -> Iterator[str]:
    names: list[str] = []
    group = SimpleNamespace(addoption=lambda name, **_: names.append(name))
    add_options(SimpleNamespace(getgroup=lambda *_: group, addini=lambda *_, **__: None))
    yield from (name.lstrip("-").partition("=")[0] for name in names)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_pages_say_what_docstrings_say(page: Path) -> None:
    """Write them anew: python docs/reference_python.py."""
    text = page.read_text(encoding="utf-8")
    assert runpy.run_path(str(PAGES[0].with_name("reference_python.py")))["filled"](text) == text


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Functions", set(pytest_torchmem.__all__) - {"__version__"}),
        ("`trace(", parameters(trace)),
        ("Functions", parameters(measure)),
        ("The fixture", parameters(Torchmem.check) | {"check", "trace"}),
        ("The marker", set(ARGUMENTS.parameters)),
        ("Options", set(options())),
        ("The profile", {name for name in dir(MemoryProfile) if not name.startswith("_")}),
        ("Hooks", {name for name in vars(hookspec) if name.startswith("pytest_torchmem")}),
        (
            "Errors",
            {
                name
                for name, found in vars(errors).items()
                if isinstance(found, type) and issubclass(found, errors.TorchmemError)
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_is_there(title: str, names: set[str]) -> None:
    assert names
    assert names - named(section(title)) == set()


def test_options_that_pages_name_are_there() -> None:
    root = Path(__file__).parents[1]
    text = "".join(p.read_text("utf-8") for p in [*root.glob("*.md"), *root.glob("docs/**/*.md")])
    found = set(re.findall(r"--(torchmem-[a-z-]*[a-z])", text))
    assert len(found) > 10
    assert found - set(options()) == set()


def test_every_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.M)
    assert commands
    assert {f"torchmem {name}" for name in commands} <= {
        " ".join(part.split()[:2]) for part in re.findall(r"`([^`\n]+)`", section("The command"))
    }
