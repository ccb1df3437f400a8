"""Calibration files: their format, what an update makes of them, and that they are no snapshots."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_torchmem.cli import main
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.snapshots.calibration import (
    StoredCalibration,
    dump,
    flat,
    load,
    merged,
    nested,
    plan_calibration,
    read_calibration,
    read_calibration_file,
    write_calibration,
)
from pytest_torchmem.snapshots.location import (
    CALIBRATION,
    calibration_path,
    orphans_in,
    snapshot_path,
)
from pytest_torchmem.snapshots.store import change_file
from pytest_torchmem.targets.gpus import Calibration, Figures, Setup, WorkspaceKey
from pytest_torchmem.targets.gpus import WorkspaceSize as Size
from tests.plugin.conftest import git, valid

A100 = Setup("a100-80gb", "2.13", "9.19.0")
OLDER = Setup("a100-80gb", "2.13", "9.10.2")
OLD_TORCH = Setup("a100-80gb", "2.12", "9.10.2")
T4 = Setup("t4", "2.13")
CONVOLUTION = WorkspaceKey("aten::convolution", "float32[2,3,8,8], float32[4,3,3,3]")
FFT = WorkspaceKey("aten::_fft_r2c", "float32[8]")
LSTM = WorkspaceKey("aten::_cudnn_rnn", "float32[5,2,8]; deterministic")
FIGURES = {T4: {FFT: Size(0)}, A100: {LSTM: Size(4096, 1_000_000), CONVOLUTION: Size(12_345)}}
TEXT = """\
{
  "kind": "pytest-torchmem calibration",
  "schema": 1,
  "setups": [
    {
      "gpu": "a100-80gb",
      "torch": "2.13",
      "cudnn": "9.19.0",
      "workspaces": {
        "aten::_cudnn_rnn": {
          "float32[5,2,8]; deterministic": [4096, "4.00 KiB"]
        },
        "aten::convolution": {
          "float32[2,3,8,8], float32[4,3,3,3]": [12345, "12.06 KiB"]
        }
      },
      "reserves": {
        "aten::_cudnn_rnn": {
          "float32[5,2,8]; deterministic": [1000000, "976.6 KiB"]
        }
      }
    },
    {
      "gpu": "t4",
      "torch": "2.13",
      "workspaces": {
        "aten::_fft_r2c": {
          "float32[8]": [0, "0 B"]
        }
      }
    }
  ]
}
"""


def stored(figures: object, path: Path = Path("gpu-calibration.json")) -> StoredCalibration:
    text = dump(figures)  # type: ignore[arg-type]
    return StoredCalibration(path, dict(flat(load(text))), {}, True, text)


def test_a_file_has_one_line_for_each_figure() -> None:
    assert dump(FIGURES) == TEXT
    assert load(TEXT) == FIGURES
    assert load(dump({})) == {}
    valid(json.loads(TEXT), "calibration")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "expected an object, found a list"),
        ("{}", 'has no valid "schema" number'),
        (TEXT.replace("pytest-torchmem", "other"), 'its "kind" is not'),
        (TEXT.replace('"schema": 1', '"schema": 2'), "written by a newer pytest-torchmem"),
        (TEXT.replace('"setups"', '"figures"'), 'it has no list "setups"'),
        (TEXT.replace('"schema"', '"x": 1, "schema"'), 'the file has "x", which is not part of'),
        (TEXT.replace('"gpu": "t4"', '"gpu": 4'), 'setup 2: "gpu" must be a string'),
        (TEXT.replace('"gpu": "t4"', '"gpu": ""'), 'setup 2 has no "gpu"'),
        (TEXT.replace('"cudnn"', '"cuda"'), 'the setup a100-80gb, torch 2.13 has "cuda", which is'),
        (TEXT.replace("12345", "-1"), "must be bytes such as"),
        (TEXT.replace("12345", "1.5"), "aten::convolution"),
        (TEXT.replace('{\n          "float32[8]": [0, "0 B"]\n        }', "3"), "an object"),
        (
            TEXT.replace('"float32[5,2,8]; deterministic": [1000000', '"float32[9]": [1000000'),
            "has a reserve of aten::_cudnn_rnn without its workspace",
        ),
        (
            TEXT.replace('"t4"', '"a100-80gb", "cudnn": "9.19.0"'),
            "has the setup a100-80gb, torch 2.13, cuDNN 9.19.0 twice",
        ),
    ],
)
def test_a_broken_file_says_what_is_wrong_and_stays(text, message, tmp_path):
    path = tmp_path / CALIBRATION
    path.write_text(text)
    with pytest.raises(SnapshotError) as raised:
        read_calibration_file(path)
    assert message in str(raised.value)
    assert "The file was left as it is" in str(raised.value)
    with pytest.raises(SnapshotError):
        write_calibration(path, Calibration(FIGURES))
    assert path.read_text() == text


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_file_changed_in_random_ways_is_read_or_refused(data: st.DataObject) -> None:
    lines = TEXT.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line = data.draw(st.sampled_from([*lines, "", "<<<<<<< ours\n", '"x": null,\n', "{\n"]))
        lines[at : at + data.draw(st.integers(0, 2))] = [line]
    try:
        found = load("".join(lines))
    except SnapshotError:
        return
    assert load(dump(found)) == found


def test_read_and_write_without_pytest(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with pytest.raises(UsageError, match="this calibration file does not exist"):
        read_calibration(path)
    write_calibration(path, Calibration({A100: {CONVOLUTION: Size(1)}}))
    write_calibration(path, Calibration({A100: {FFT: Size(2)}, T4: {FFT: Size(3)}}))
    found = read_calibration(str(path))
    assert found.figures == {A100: {CONVOLUTION: Size(1), FFT: Size(2)}, T4: {FFT: Size(3)}}
    assert len(found) == 3
    assert "a100-80gb, torch 2.13, cuDNN 9.19.0" in repr(found)


OURS = '          "float32[2,3,8,8], float32[4,3,3,3]": [12345, "12.06 KiB"]\n'
THEIRS = OURS.replace('[12345, "12.06', '[54321, "53.05')
CONFLICT = TEXT.replace(OURS, f"<<<<<<< ours\n{OURS}=======\n{THEIRS}>>>>>>> theirs\n")


def test_of_a_merge_conflict_what_both_sides_agree_on_is_known(tmp_path: Path) -> None:
    path = tmp_path / CALIBRATION
    path.write_text(CONFLICT)
    found = read_calibration_file(path)
    assert found.conflicted
    assert set(found.contested) == {(A100, CONVOLUTION)}
    assert nested(found.entries) == {**FIGURES, A100: {LSTM: FIGURES[A100][LSTM]}}
    with pytest.raises(UsageError, match="unresolved merge conflict"):
        read_calibration(path)
    unsettled = plan_calibration(found, {T4: {FFT: Size(8)}})
    assert "aten::convolution on a100-80gb" in unsettled.problem
    assert not unsettled.changes_file
    settled = plan_calibration(found, {A100: {CONVOLUTION: Size(99)}})
    assert not settled.problem
    assert settled.text == TEXT.replace('[12345, "12.06 KiB"]', '[99, "99 B"]')


@pytest.mark.parametrize("setup", [OLDER, OLD_TORCH])
def test_a_figure_replaces_that_of_another_library(setup: Setup) -> None:
    before = stored({setup: {CONVOLUTION: Size(1), FFT: Size(2)}})
    plan = plan_calibration(before, {A100: {CONVOLUTION: Size(5), FFT: Size(2)}})
    assert plan.text is not None
    # The same bytes stay where they are: another version alone is no reason to write.
    assert load(plan.text) == {A100: {CONVOLUTION: Size(5)}, setup: {FFT: Size(2)}}
    assert plan.changed == ((A100, CONVOLUTION),)


def test_split_by_torch_keeps_a_figure_for_each_series() -> None:
    before = stored({OLD_TORCH: {FFT: Size(1)}, OLDER: {FFT: Size(2)}})
    plan = plan_calibration(before, {A100: {FFT: Size(3)}}, by_series=True)
    assert plan.text is not None
    assert load(plan.text) == {OLD_TORCH: {FFT: Size(1)}, A100: {FFT: Size(3)}}


def _update(path: Path, measured: Figures, **options: Any) -> None:
    plan = partial(plan_calibration, measured=measured, **options)
    assert not change_file(path, read_calibration_file, plan, writes=True).problem


def test_a_plan_is_applied(tmp_path: Path) -> None:
    path = calibration_path(tmp_path / "test_net.py")
    _update(path, FIGURES)
    assert path.read_text() == TEXT
    _update(path, {}, obsolete={"t4": ()})
    assert load(path.read_text()) == {A100: FIGURES[A100]}
    _update(path, {}, obsolete={"a100-80gb": ()})
    assert not path.parent.exists()


def test_of_two_processes_the_larger_figure_counts() -> None:
    one, other = {LSTM: Size(5, 10), FFT: Size(1)}, {LSTM: Size(3, 20)}
    found = merged([{A100: one}, {A100: other}, {T4: {FFT: Size(2)}}])
    assert found == {A100: {LSTM: Size(5, 20), FFT: Size(1)}, T4: {FFT: Size(2)}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a test module that is there and a calibration."""
    (tmp_path / "test_net.py").touch()
    path = calibration_path(tmp_path / "test_net.py")
    path.parent.mkdir()
    path.write_text(TEXT)
    snapshot_path(tmp_path / "test_net.py").write_text('{"schema": 1, "entries": []}')
    return tmp_path


def test_it_is_never_obsolete_for_want_of_a_module(directory: Path) -> None:
    assert orphans_in(directory) == []
    (directory / "test_net.py").unlink()
    assert orphans_in(directory) == [snapshot_path(directory / "test_net.py")]


def test_a_module_of_the_same_name_has_another_file(tmp_path: Path) -> None:
    module = tmp_path / "gpu-calibration.py"
    module.touch()
    path = snapshot_path(module)
    assert path != calibration_path(module)
    path.parent.mkdir()
    path.touch()
    assert orphans_in(tmp_path) == []


def test_verify_and_show(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = calibration_path(directory / "test_net.py")
    assert main(["verify", str(file)]) == 0
    assert main(["show", str(file)]) == 0
    a100 = "a100-80gb, torch 2.13, cuDNN 9.19.0: aten::"
    lstm = f"{a100}_cudnn_rnn(float32[5,2,8]; deterministic)"
    assert capsys.readouterr().out.splitlines() == [
        f"{lstm}: workspace 4.00 KiB (4,096 B)",
        f"{lstm}: reserve 976.6 KiB (1,000,000 B)",
        f"{a100}convolution(float32[2,3,8,8], float32[4,3,3,3]): workspace 12.06 KiB (12,345 B)",
        "t4, torch 2.13: aten::_fft_r2c(float32[8]): workspace 0 B (0 B)",
    ]
    file.write_text(CONFLICT)
    assert main(["verify", str(file)]) == 1
    file.write_text("{}")
    assert main(["verify", str(file)]) == 1
    assert "is not a calibration" in capsys.readouterr().err


def test_compare_leaves_it_out(directory, capsys, monkeypatch):
    entry = {"test": "test_it", "device": "cpu", "torch": "2.13.0", "peak": 5}
    snapshot = json.dumps({"schema": 1, "entries": [entry]})
    snapshot_path(directory / "test_net.py").write_text(snapshot)
    for command in ("init -q", "add .", "commit -q -m one"):
        git(directory, *command.split())
    monkeypatch.chdir(directory)
    assert main(["compare", "HEAD"]) == 0
    assert main(["compare", "HEAD", str(directory)]) == 0
    assert main(["compare", "HEAD", str(calibration_path(directory / "test_net.py"))]) == 2
    assert "no checks to compare" in capsys.readouterr().err
