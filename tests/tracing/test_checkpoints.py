"""Files that a traced program writes and reads: what is not known takes no space, and stays so."""

import copy
import functools
import io
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnknownValueError
from tests.results import in_a_trace, result_of, through_a_file

safetensors = pytest.importorskip("safetensors.torch")
LARGE = 1 << 28
"""Elements of a gibibyte."""


def resident() -> int:
    """Return the bytes of memory that this process has."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pytest.skip("no /proc/self/statm on this system")
    return pages * 4096


def save_and_load(path: Path, **options: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def run(state: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.save(state, path)
        return torch.load(path, **options)

    return run


def by_safetensors(path: Path, device: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def run(state: dict[str, Tensor]) -> dict[str, Tensor]:
        safetensors.save_file(state, path, {"format": "pt"})
        return safetensors.load_file(path, device=device)

    return run


def ways(folder: Path, device: str) -> dict[str, Callable[[Any], dict[str, Tensor]]]:
    file = folder / "state.pt"
    found = {
        "plain": save_and_load(file),
        "mapped": save_and_load(file, mmap=True),
        "whole": save_and_load(file, weights_only=False),
        "onto": save_and_load(file, map_location=device),
        "function": save_and_load(file, map_location=lambda storage, location: storage),
        "safetensors": by_safetensors(folder / "state.safetensors", device),
    }
    if device == "cuda":
        found["number"] = by_safetensors(folder / "state.safetensors", 0)
    return found


@in_a_trace(values="none")
def test_what_is_known_is_read_back_and_what_is_not_stays_unknown(device, tmp_path):
    unknown = torch.randn(2_000, device=device).bool().sum(dtype=torch.int64).repeat(3)
    state = {"known": torch.tensor([3, 1, 2], device=device), "unknown": unknown}
    for name, way in (ways(tmp_path, device) | {"bytes": through_a_file}).items():
        found = way(state)
        assert found["known"].tolist() == [3, 1, 2], name
        on = "cpu" if name == "function" else device
        assert {tensor.device.type for tensor in found.values()} == {on}, name
        with pytest.raises(UnknownValueError):
            torch.empty(found["unknown"].tolist())


def test_a_gibibyte_takes_neither_disk_nor_memory_nor_time(device: str, tmp_path: Path) -> None:
    def program() -> None:
        layer = nn.Linear(LARGE // 1024, 1024, bias=False, device=device)
        state = dict(layer.state_dict())
        before, begin = resident(), time.perf_counter()
        copy.deepcopy(state)
        for name, way in ways(tmp_path, device).items():
            layer.load_state_dict(way(state))
            assert resident() - before < 1 << 28, name
        taken = sum(path.stat().st_blocks for path in tmp_path.iterdir()) * 512
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert min(sizes) > 4 * LARGE
        assert taken < 1 << 20
        assert time.perf_counter() - begin < 30  # a second, where the machine does nothing else

    trace(program, device=device)
    assert torch.load(tmp_path / "state.pt", map_location="cpu", mmap=True)["weight"][0, 0] == 0
    assert safetensors.load_file(tmp_path / "state.safetensors")["weight"].shape[0] == 1024


def test_files_of_a_trace_are_read_by_others(tmp_path: Path) -> None:
    def program() -> None:
        state = {"a": torch.randn(5, 3), "step": torch.arange(4), "half": torch.randn(3).half()}
        torch.save(state, tmp_path / "a.pt")
        safetensors.save_file(state, tmp_path / "a.safetensors", {"format": "pt"})

    trace(program, values="none")
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("a")[1:].shape == (4, 3)
    for state in (torch.load(tmp_path / "a.pt"), safetensors.load_file(tmp_path / "a.safetensors")):
        assert state["step"].tolist() == [0, 1, 2, 3]
        assert (state["a"].shape, state["half"].dtype) == ((5, 3), torch.float16)
        assert not state["a"].any()


@in_a_trace()
def test_tensors_that_share_a_storage_share_it_in_the_file(tmp_path: Path) -> None:
    whole = torch.randn(4, 4).t()
    torch.save([whole, whole[1:]], tmp_path / "a.pt")
    first, second = torch.load(tmp_path / "a.pt")
    assert (first.stride(), second.shape) == ((1, 4), (3, 4))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_real_files_are_read_as_they_are(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(6.0)}, tmp_path / "a.pt")
    safetensors.save_file({"weight": torch.arange(6.0)}, tmp_path / "a.safetensors")

    def program() -> None:
        for mapped in (False, True):
            state = torch.load(tmp_path / "a.pt", mmap=mapped)
            assert state["weight"].tolist() == [0, 1, 2, 3, 4, 5]
        state = safetensors.load_file(tmp_path / "a.safetensors")
        assert state["weight"].tolist() == [0, 1, 2, 3, 4, 5]

    trace(program)


def test_files_of_the_older_format_are_read_as_they_are(tmp_path: Path) -> None:
    """torch.load reads their contents into storages that are there already."""
    state = {"weight": torch.arange(6.0)[2:], "bias": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    def program() -> None:
        for device in ("cpu", "cuda"):
            state = torch.load(tmp_path / "a.pt", map_location=device)
            assert state["weight"].device.type == device
            assert (state["weight"].tolist(), state["bias"].tolist()) == ([2, 3, 4, 5], [1, 1])

    trace(program, device="cuda")


@in_a_trace("cuda")
def test_a_program_may_ask_for_the_older_format_in_the_place_of_torch_save(monkeypatch):
    original, file = torch.save, io.BytesIO()
    older = functools.partial(original, _use_new_zipfile_serialization=False)
    with monkeypatch.context() as within:
        within.setattr(torch, "save", older)
        torch.save({"weight": torch.arange(6.0, device="cuda")}, file)
    file.seek(0)
    assert torch.load(file)["weight"].tolist() == [0, 1, 2, 3, 4, 5]


def test_pickled_tensors_keep_what_is_known_of_them(device: str) -> None:
    """``pickle`` saves each storage in the older format."""

    def program() -> None:
        layer = nn.Linear(3, 3, device=device)
        copied = pickle.loads(pickle.dumps(layer))
        assert copied.weight.device.type == device
        assert torch.equal(copied.weight, layer.weight)

    def unknown() -> int:
        read: Tensor = pickle.loads(pickle.dumps(torch.randn(2_000, device=device)))
        return int((read > 0).sum())

    trace(program, device=device)
    with pytest.raises(UnknownValueError):
        trace(unknown, device=device, values="none")


def test_a_file_that_was_written_anew_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"

    trace(lambda: safetensors.save_file({"a": torch.randn(2, 2).argmax(1) + 7}, path))
    safetensors.save_file({"a": torch.tensor([5, 6])}, path)
    assert result_of(lambda: safetensors.load_file(path)["a"].tolist()) == [5, 6]


def test_nothing_stays_replaced() -> None:
    from safetensors import safe_open

    writer, serialize = torch._C.PyTorchFileWriter, safetensors.serialize_file
    trace(lambda: None)
    assert type(safe_open) is type
    assert type(torch.device) is type
    assert torch._C.PyTorchFileWriter is writer
    assert safetensors.serialize_file is serialize


def test_a_file_of_a_traced_program_has_the_size_of_a_real_one(tmp_path: Path) -> None:
    def save() -> None:
        path.unlink(missing_ok=True)
        torch.save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict(), path)
        sizes.append(path.stat().st_size)

    path, sizes = tmp_path / "file.pt", list[int]()
    save()
    trace(save)
    assert sizes[0] == sizes[-1]


@pytest.mark.parametrize("values", ["auto", "none"])
def test_exported_weights_are_counted_as_they_are_read(values: Any) -> None:
    def program() -> None:
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        weight = torch.export.load(file).state_dict["weight"]
        assert weight.shape == (64, 64)
        weight.t() @ weight

    exported = torch.export.export(nn.Linear(64, 64), (torch.ones(2, 64),))
    assert trace(program, host="here", values=values).peak == measure(program).peak


def test_what_files_take_while_they_are_read() -> None:
    def file(**options: Any) -> io.BytesIO:
        made = io.BytesIO()
        torch.save({"small": torch.ones(1)}, made, **options)
        made.seek(0)
        return made

    def numbers() -> None:
        through_a_file(3)

    programs: list[Callable[[], object]] = [
        numbers,
        lambda: torch.load(file()),
        lambda: torch.load(file(_use_new_zipfile_serialization=False)),
        lambda: pickle.loads(pickle.dumps(torch.ones(2))),
    ]
    for program in programs:
        traced = trace(program, host="here").figures()
        traced.pop("host_peak", None)  # of Python's memory, which torch's profiler does not see
        assert traced == measure(program).figures()
