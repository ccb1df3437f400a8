"""What the README shows is what its examples print."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_failure_in_the_readme_is_the_one_that_is_printed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    missing = [line for line in lines if line.rstrip() not in printed and "===" not in line]
    assert missing == []
