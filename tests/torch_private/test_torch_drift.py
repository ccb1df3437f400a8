"""The description of torch agrees with the one it was written for; what differs is found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import torch_drift
from pytest_torchmem.torch_private import names


@pytest.fixture
def described() -> Any:
    read = json.loads(torch_drift.DESCRIPTION.read_text(encoding="utf-8"))
    if torch.__version__.partition("+")[0] != read["torch"]:
        pytest.skip(f"torch {read['torch']} is described")
    if torch.backends.cuda.is_built():
        pytest.skip("the build for the CPU is described")
    return read


def printed(described: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what the script prints of drift from a description, whose exit status must fit."""
    path = folder / "description.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    status = torch_drift.main(["--description", str(path)])
    *lines, total = capsys.readouterr().out.splitlines()
    assert total.endswith(f"against {described['torch']}: {len(lines)} differences")
    assert status == bool(lines)
    return lines


def test_the_described_torch_has_not_drifted(described, tmp_path, capsys):
    assert len(described["operators"]) > 1000
    assert printed(described, tmp_path, capsys) == []


def test_drift_is_found(described, tmp_path, capsys, monkeypatch):
    operators = described["operators"]
    before = dict(operators)
    described["private names"]["torch.nn.Module._apply"] = "self fn"
    described["replaced functions"]["torch.cuda.gone"] = "device"
    described["replaced functions"]["torch.cuda.synchronize"] = "stream"
    operators["aten::mm"] = operators["aten::mm"].replace("mat2", "other")
    operators["aten::mm.gone"] = "self | cpu"
    operators["aten::nobody_names_this"] = "self | cpu"
    operators["aten::relu"] = operators["aten::relu"].replace("cpu", "explicit")
    operators["aten::t"] = operators["aten::t"].replace(" view", "")
    del operators["aten::dot"]
    torch_drift.import_package()
    monkeypatch.setitem(names.DECLARED, "torch.distributed._gone", None)
    lines = printed(described, tmp_path, capsys)
    assert lines[0] == "gone: torch.distributed._gone"
    assert [line.partition(",")[0] for line in lines[1:]] == [
        "torch.nn.Module._apply takes: self fn recurse",
        "torch.cuda.synchronize takes: device",
        "gone: torch.cuda.gone",
        "aten::mm takes: self mat2",
        f"aten::relu has: {before['aten::relu'].partition(' | ')[2]}",
        f"aten::t has: {before['aten::t'].partition(' | ')[2]}",
        "gone: aten::mm.gone",
        f"new: aten::dot ({before['aten::dot']})",
    ]
    assert "aten::mm takes: self mat2, before: self other" in lines


def test_a_torch_that_cannot_be_traced(described, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(names.DECLARED, "torch._C._gone", names.MissingName("torch._C._gone"))
    gone, refused = printed(described, tmp_path, capsys)
    assert gone == "gone: torch._C._gone"
    assert "cannot trace on torch" in refused
    assert "it has no torch._C._gone. " in refused


def test_a_description_is_written(tmp_path: Path, described: Any) -> None:
    path = tmp_path / "description.json"
    assert torch_drift.main(["--write", "--description", str(path)]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["operators"] == described["operators"]
    assert torch_drift.main(["--description", str(path)]) == 0
