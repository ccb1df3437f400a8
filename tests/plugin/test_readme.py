"""What README and CONTRIBUTING show is what their examples print; pages by task are true."""

import re
import shlex
import shutil
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest

import pytest_torchmem
from pytest_torchmem.cli import _parser
from tests.plugin.conftest import Project

ROOT = Path(__file__).parents[2]
by_name = attrgetter("stem")


def test_the_failure_in_the_readme_is_the_one_that_is_printed(pytester, monkeypatch):
    examples = pytester.path / "examples"
    (examples / "__torchmem__").mkdir(parents=True)
    for name in ("regression_example.py", "__torchmem__/regression_example.json"):
        shutil.copy(ROOT / "examples" / name, examples / name)
    monkeypatch.setenv("COLUMNS", "100")
    for variable in ("CI", "GITHUB_ACTIONS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    result = pytester.runpytest("examples/regression_example.py", "--torchmem-devices", "cuda")
    result.assert_outcomes(failed=1)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("regression_example.py --torchmem-devices cuda\n")[2]
    lines = shown.partition("```")[0].splitlines()
    assert len(lines) > 25
    printed = [line.rstrip() for line in result.outlines]
    assert [line for line in lines if line.rstrip() not in printed and "===" not in line] == []


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MYMODELS = """
import types
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import pytest_torchmem as torchmem

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, stride=8), nn.Flatten(), nn.Linear(6272, 4))

model, x = Net(), torch.randn(8, 3, 224, 224)
detector, images = model, x

def train_one_step(device):
    model.to(device)(x.to(device)).sum().backward()
"""
"""What a page takes for granted: the reader's own module, and imports that were shown before."""
_WITH_A_GPU = "torchmem.calibrate("


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def is_installed(block: str) -> bool:
    """Tell whether there is what a block imports, the reader's own module apart."""
    names = set(re.findall(r"^ *(?:from|import) (\w+)", block, re.M)) - {"mymodels", "mylib"}
    return all(find_spec(name) for name in names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=by_name)
def test_the_programs_of_a_page_run(project: Project, page: Path) -> None:
    alone = "tasks" in page.parts or page.stem == "index"  # to be copied as they are
    before = "" if alone else "from mymodels import *\n"
    files = {"mymodels": MYMODELS, "mylib": before, "conftest": ""}
    for number, text in enumerate(filter(is_installed, blocks(page, "python"))):
        if "def test_" in text:
            files[f"test_{number}"] = before + text
        elif text.startswith("# conftest.py\n"):
            files["conftest"] += text
        elif _WITH_A_GPU not in text:
            files["mylib"] += text
    files["test_mylib"] = "def test_is_imported():\n    import mylib\n"
    project.write(**files)
    assert project.run("--torchmem-update").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    lines = "".join(blocks(page, "console")).splitlines()
    for words in (shlex.split(line.removeprefix("$ "), comments=True) for line in lines):
        if words and words[0] == "torchmem":
            _parser().parse_args(words[1:])


def test_a_page_is_read_in_a_few_minutes() -> None:
    others = {"cuda-operators.md", "architecture.md"}  # a generated table; the package's layers
    words = {
        page.name: len(page.read_text(encoding="utf-8").split())
        for page in [ROOT / "CONTRIBUTING.md", *PAGES]
        if page.name not in others
    }
    assert len(words) > 30
    assert {name: count for name, count in words.items() if count > 1500} == {}


def test_messages_with_a_cure_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "tasks" / "errors.md").read_text(encoding="utf-8")
    package = Path(pytest_torchmem.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py")))
    said = re.findall(r"^\| .*?`([^`]+)`", page, re.M)
    pieces = [re.sub(r"mps devices$", "", re.sub(r"'?…'? ?|: \+.*", "", text)) for text in said]
    assert len(pieces) > 10
    assert [piece for piece in pieces if piece.strip() not in source] == []


def test_links_lead_to_files() -> None:
    folders = ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "benchmarks").rglob("*.md")
    pages = [page for folder in folders for page in folder]
    assert len(pages) > 20
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    found = {page: re.findall(r"\]\(([\w./-]*\w/?)[)#]", text) for page, text in texts.items()}
    links = {(page, link) for page, of_page in found.items() for link in of_page}
    assert [one for one in sorted(links) if not (one[0].parent / one[1]).exists()] == []


def test_the_example_passes(pytester: pytest.Pytester) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    pytester.makepyfile(test_norms=example)
    # In a process of its own: torch and the registry keep the operator.
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
