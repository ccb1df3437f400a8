"""What a memory check that passes costs, against the same check of another commit.

    python -m benchmarks.passing_check REVISION [--pairs 4] [--checks 12] [--fresh]

Each pair runs pytest on either commit, the order alternating: a project with two models, whose
snapshots are written first, each of which is built and checked several times on fake cpu and fake
cuda with AdamW. What is timed is ``torchmem.check`` alone, in processor time; the first check of a
process, which imports and remembers, has a line of its own. The models' own modules are warm.
With ``--fresh`` there is no byte code but what pip makes when it installs, as in a new container.
"""

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tomli
from tabulate import tabulate

from benchmarks import command
from benchmarks.conformance.report import machine

ROOT = Path(__file__).parent.parent
_TIMES = "PASSING_CHECK_TIMES"
_COUNT = "PASSING_CHECK_COUNT"
_NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"
_TESTS = f"""
import json, os, time
import pytest, torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2():
    config = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=1000)
    return GPT2LMHeadModel(config), torch.randint(0, 1000, (2, 64))


def convolutions():
    blocks = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*sum(blocks, ())), torch.randn(2, 16, 32, 32)


def linear():
    return nn.Linear(8, 8), torch.randn(2, 8)


MODELS = {{"GPT-2, 6 layers": gpt2, "CNN, 8 blocks": convolutions, "one linear layer": linear}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", range(int(os.environ["{_COUNT}"])))
def test_step(torchmem, number, name):
    model, x = MODELS[name]()
    begin = time.process_time()
    torchmem.check(model, x, optimizer=torch.optim.AdamW)
    spent = time.process_time() - begin
    with open(os.environ["{_TIMES}"], "a") as file:
        print(json.dumps([name, number, spent]), file=file)
"""
_AS_INSTALLED = """
import pytest

pytest.register_assert_rewrite("pytest_torchmem")  # what pytest does with an installed plugin
"""
Times = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure pairs of runs and print how the checks of this checkout stand to the other's."""
    parser = command("passing_check", __doc__)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=4, help="runs of either commit")
    parser.add_argument("--checks", type=int, default=12, help="of each model in a run")
    parser.add_argument("--fresh", action="store_true", help="with the byte code of pip alone")
    options = parser.parse_args(arguments)
    os.environ.pop(_NO_BYTE_CODE, None)
    if options.fresh:
        os.environ[_NO_BYTE_CODE] = "1"
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    with tempfile.TemporaryDirectory() as name:
        other, projects = Path(name) / "other", {}
        other.mkdir()
        archive = subprocess.check_output(["git", "archive", options.revision], cwd=ROOT)
        subprocess.run(["tar", "-x"], cwd=other, input=archive, check=True)
        for label, checkout in (("now", ROOT), ("before", other)):
            compileall.compile_dir(checkout / "pytest_torchmem", quiet=1)
            project = projects[checkout] = Path(name) / label
            project.mkdir()
            (project / "test_steps.py").write_text(_TESTS)
            (project / "conftest.py").write_text(_AS_INSTALLED)
            _run(checkout, project, options.checks, "--torchmem-update")
        pairs = []
        for turn in range(options.pairs):
            order = [ROOT, other][:: 1 - 2 * (turn % 2)]
            found = {one: _run(one, projects[one], options.checks) for one in order}
            pairs.append((found[other], found[ROOT]))
    rows = []
    for model in pairs[0][0]:
        of_model = [(before[model], now[model]) for before, now in pairs]
        firsts = [(before[0], now[0]) for before, now in of_model]
        rest = [(statistics.median(b[1:]), statistics.median(n[1:])) for b, n in of_model]
        rows += [_row(f"{model}, first", firsts), _row(model, rest)]
    headers = ("check", f"{options.revision} ms", "now ms", "now / before")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    return 0


def _run(checkout: Path, project: Path, checks: int, *options: str) -> Times:
    """Run a project's tests with the plugin of a checkout, and return the seconds by model."""
    settings = tomli.loads((checkout / "pyproject.toml").read_text())
    plugin = settings["project"]["entry-points"]["pytest11"]["torchmem"]
    times = project / "times"
    times.unlink(missing_ok=True)
    own = {_TIMES: str(times), _COUNT: str(checks), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    left_out = ("CI", "GITHUB_ACTIONS")
    kept = {name: one for name, one in os.environ.items() if name not in left_out}
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options],
        cwd=project,
        env={**kept, **own, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: Times = {}
    for line in times.read_text().splitlines():
        name, _, spent = json.loads(line)
        found.setdefault(name, []).append(spent)
    return found


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    ratios = [now / before for before, now in pairs]
    before, now = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
    return name, f"{before:.1f}", f"{now:.1f}", spread


if __name__ == "__main__":
    sys.exit(main())
