"""Files that several runs write, that signals meet, and that are no ordinary files."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots import files
from pytest_torchmem.snapshots.files import locked
from pytest_torchmem.snapshots.store import read
from tests.plugin.conftest import checking
from tests.processes import waits_for

ONE = checking("1000, device='cpu'")
linux = pytest.mark.skipif(sys.platform != "linux", reason="pipes, devices and signals of Linux")

WRITER = """
import sys, json
from pathlib import Path
from pytest_torchmem.snapshots.files import locked, read_text, remove, write

path, own, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(last):
    with locked(path):
        found = json.loads(read_text(path) or "{}")
        assert found.get(own, number - 1) == number - 1, (own, number, found)
        write(path, json.dumps({**found, own: number}))
    with locked(path):
        found = json.loads(read_text(path) or "{}")
        assert found[own] == number, (own, number, found)
        if number % 3 == 2:  # the last one removes the directory as well
            del found[own]
            write(path, json.dumps(found)) if found else remove(path)
"""


def test_no_write_is_lost_while_others_remove_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "__torchmem__" / "test_x.json"
    commands = ([sys.executable, "-c", WRITER, str(path), name, "90"] for name in "abc")
    writers = [subprocess.Popen(one, stderr=subprocess.PIPE, text=True) for one in commands]
    assert [writer.communicate()[1] for writer in writers] == ["", "", ""]
    assert not path.parent.exists()


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_write(tmp_path: Path, number: int) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from pytest_torchmem.snapshots.files import write\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # behind a shell's &\n"
        "real = os.fsync\n"
        "os.fsync = lambda descriptor: (os.kill(os.getpid(), int(sys.argv[2])), real(descriptor))\n"
        "write(Path(sys.argv[1]), 'new')\n"
        "print('went on')\n"
    )
    path = tmp_path / "x.json"
    path.write_text("old")
    command = [sys.executable, "-c", program, str(path), str(int(number))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == -number
    assert "went on" not in result.stdout
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["x.json"]


def test_what_a_killed_run_left_is_swept_up(light):
    light.run("--torchmem-update", test_net=ONE)
    left = light.file().with_name(".test_net.json.abcd_123.tmp")
    left.write_text("half")
    kept = light.file().with_name(".test_net.json.swp")
    kept.write_text("an editor's")
    light.run("--torchmem-update", test_net=ONE.replace("1000", "2000"))
    assert not left.exists()
    assert kept.exists()


def test_a_run_that_never_ends_is_not_waited_for(light, monkeypatch):
    pytest.importorskip("fcntl")
    light.run("--torchmem-update", test_net=ONE)
    with light.unchanged():
        light.write(test_net=ONE.replace("1000", "2000"))
        monkeypatch.setattr(files, "PATIENCE", 0.1)
        with locked(light.file()):
            light.run("--torchmem-update").fails("error: *another run has been writing there*")


def test_a_dry_run_makes_no_directory(light):
    light.run("--torchmem-dry-run", test_net=ONE)
    assert not light.file().parent.exists()


def test_the_target_of_a_link_is_locked_as_well(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    target = tmp_path / "target" / "shared.json"
    links = [tmp_path / name / "__torchmem__" / "test_x.json" for name in ("a", "b")]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    waits_for(*map(locked, links))


def test_links_of_modules_that_are_gone_are_left_alone(light):
    """Two modules share a file; an update must not take the one for what the other left."""
    light.run("--torchmem-update", test_net=ONE)
    light.edit("test_it cpu", reason="ours")
    light.file("test_gone").symlink_to(light.file().name)
    other = light.path / "sub"
    other.mkdir()
    (other / "__torchmem__").symlink_to(light.file().parent)
    (other / "test_plain.py").write_text("def test_plain(): pass\n")
    both = ONE + ONE.replace("test_it", "test_more")
    assert "obsolete" not in light.run("--torchmem-update", test_net=both, passed=3).stdout.str()
    assert set(light.entries()) == {"test_it cpu", "test_more cpu"}
    assert light.entries()["test_it cpu"]["reason"] == "ours"


@linux
@pytest.mark.parametrize("option", ["json", "markdown"])
def test_reports_into_devices_pipes_and_links(light, option):
    light.run("--torchmem-update", test_net=ONE)
    null = light.path / "null"
    os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3)) if os.geteuid() == 0 else None
    for device in ("/dev/null", *((str(null),) if null.exists() else ())):
        before = os.stat(device)
        assert light.run(f"--torchmem-{option}={device}").ret == 0
        assert os.stat(device).st_ino == before.st_ino
        assert stat.S_ISCHR(os.stat(device).st_mode)
    pipe = light.path / "pipe"
    os.mkfifo(pipe)
    read_end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert light.run(f"--torchmem-{option}={pipe}").ret == 0
    os.set_blocking(read_end, True)
    assert b"test_net.py::test_it" in os.read(read_end, 1 << 16) or option == "markdown"
    os.close(read_end)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    real, link = light.path / "real.txt", light.path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    assert light.run(f"--torchmem-{option}={link}").ret == 0
    assert link.is_symlink()
    assert "pytest-torchmem" in real.read_text()


@linux
def test_a_pipe_that_nobody_reads_is_told_and_not_waited_for(light):
    light.run("--torchmem-update", test_net=ONE)
    pipe = light.path / "pipe"
    os.mkfifo(pipe)
    result = light.run(f"--torchmem-json={pipe}")
    result.fails("error: a report cannot be written: *nothing reads from this*")


@linux
def test_a_snapshot_that_is_no_file_is_told_and_not_waited_for(light, tmp_path):
    light.write(test_net=ONE)
    light.file().parent.mkdir()
    os.mkfifo(light.file())
    for options in ((), ("--torchmem-update",)):
        result = light.run(*options, failed=1)
        result.tells("*test_net.json: cannot be read: it is not a regular file")
    with pytest.raises(SnapshotError, match="not a regular file"):
        read(Path("/dev/zero"))
    assert stat.S_ISFIFO(light.file().stat().st_mode)
