"""An upgrade of cuDNN under which a layer takes twice as much fails a test, without a GPU.

ResNet's first layer in float32 on an A100: 9.10.2 (torch 2.8 to 2.10) convolves it as it is, and
9.20.0 (torch 2.12 and 2.13) copies the output. ``TORCHMEM_CUDNN_EARLIER`` and
``TORCHMEM_CUDNN_LATER`` are folders that pip installed ``nvidia-cudnn-cu12==9.10.2.21`` and
``nvidia-cudnn-cu13==9.20.0.48`` into.
"""

import os
from pathlib import Path

import pytest

from pytest_torchmem.cudnn.questions import VARIABLE, Installed, find_installed

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


def test_an_upgrade_of_cudnn(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
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
