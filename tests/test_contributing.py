"""The worked example of CONTRIBUTING.md passes as it stands there."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_example_passes(pytester: pytest.Pytester) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = blocks
    pytester.makepyfile(test_norms=example)
    # In a process of its own: torch and the registry keep the operator.
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
