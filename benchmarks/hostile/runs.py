"""Signals in the middle of runs, two and three runs at once, and files that are no snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time

from benchmarks.hostile.project import Project, trouble

TEST = "def test_{number}(torchmem):\n    torchmem.check({size}, 'w{number}', device='cpu')\n"


def _module(numbers: range, size: int) -> str:
    return "".join(TEST.format(number=number, size=size) for number in numbers)


def hostile_signal(project: Project, chance: random.Random) -> list[str]:
    """End an update at any moment: an entry is the old or the new one, and no other file stays."""
    numbers = range(chance.randint(1, 12))
    (project.path / "test_net.py").write_text(_module(numbers, 1000))
    found = trouble(project.run("--torchmem-update"))
    (project.path / "test_net.py").write_text(_module(numbers, 2000))
    before = project.files()
    number = chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL))
    running = project.start("--torchmem-update")
    time.sleep(chance.random() * 0.2)
    with contextlib.suppress(ProcessLookupError):
        running.kill(number)
    result = running.wait()
    if result.status not in (0, 1, 2, -number):
        found.append(f"status {result.status} after {number.name}")
    try:
        sizes = {entry["forward_peak"][0] for entry in project.entries().values()}
    except ValueError as error:
        left = sorted(project.files())
        return (
            [*found, f"after {number.name}: {error}; {left}"] if number != signal.SIGKILL else found
        )
    if len(project.entries()) != len(numbers) or not sizes <= {1000, 2000}:
        found.append(f"after {number.name}: {len(project.entries())} entries, {sizes}")
    if set(project.files()) != set(before) and number != signal.SIGKILL:
        found.append(f"after {number.name}: {sorted(project.files())}")
    found += trouble(project.run("--torchmem-update"))
    if set(project.files()) != set(before):
        found.append("what was left was not swept up")
    return found


def hostile_neighbours(project: Project, chance: random.Random) -> list[str]:
    """Update two or three parts of a module, or modules, at once: nobody's entries are lost."""
    several = chance.choice((2, 3))
    parts = [range(10 * part, 10 * part + chance.randint(1, 4)) for part in range(several)]
    one_file = chance.random() < 0.5
    modules = ["test_all"] if one_file else [f"test_m{part}" for part in range(several)]
    for index, module in enumerate(modules):
        mine = [n for part in (parts if one_file else [parts[index]]) for n in part]
        text = "".join(TEST.format(number=number, size=1000) for number in mine)
        (project.path / f"{module}.py").write_text(text)
    gone = chance.random() < 0.3
    if gone:  # a file whose module is gone, which every run may want to remove
        project.file("test_gone").parent.mkdir()
        project.file("test_gone").write_text('{"schema": 1, "entries": []}')
    running = []
    for part, numbers in enumerate(parts):
        module = modules[0] if one_file else modules[part]
        tests = [f"{module}.py::test_{number}" for number in numbers]
        running.append(project.start("--torchmem-update", *tests))
        time.sleep(chance.random() * 0.05)
    results = [one.wait() for one in running]
    found = [line for result in results for line in trouble(result)]
    written = {test for _, test in project.entries()}
    expected = {f"test_{number}" for numbers in parts for number in numbers}
    if written != expected:
        found.append(f"lost: {sorted(expected - written)}, too many: {sorted(written - expected)}")
    return found + ([results[0].output[-2000:]] if found else [])


HOSTILE = (
    "1e999", "-1e400", "1" + "0" * 400, "1" + "0" * 5000, '"7"', "true", "null", "[]", "{}", "-1",
    '{"a":' * 1000 + "1" + "}" * 1000, "[" * 500 + "]" * 500, '"\\u001b[2J\\n"', '"1e999999999"',
    '"\\ud800"', "NaN", "Infinity", '"9999999999999999999999%"', "9223372036854775808", "1e308",
)  # fmt: skip
_PLACES = ("test", "device", "torch", "workload", "peak", "forward_peak", "tolerance", "reason",
    "ours", "measured", "at_forward_peak", "gpu", "name", "world_size", "rank")  # fmt: skip


def hostile_file(project: Project, chance: random.Random) -> list[str]:
    """Put a value that means harm into a snapshot, or something else in its place."""
    (project.path / "test_net.py").write_text(_module(range(2), 1000))
    found = trouble(project.run("--torchmem-update"))
    file = project.file("test_net")
    data = json.loads(file.read_text())
    entry = data["entries"][0]
    for _ in range(chance.randint(1, 2)):
        entry[chance.choice(_PLACES)] = f"HERE{chance.randrange(len(HOSTILE))}."
    text = json.dumps(data)
    for number, value in enumerate(HOSTILE):
        text = text.replace(f'"HERE{number}."', value)
    kind = chance.choice(("text", "text", "text", "text", "fifo", "directory", "link", "bytes"))
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "link":
        file.symlink_to(chance.choice(("/dev/zero", "/dev/null", "test_net.json", "nowhere.json")))
    else:
        bad = bytes(chance.randrange(256) for _ in range(200))
        file.write_bytes(text.encode() if kind == "text" else bad)
    content = file.read_bytes() if kind in ("text", "bytes") else b""
    update = chance.random() < 0.5
    started = time.process_time()
    result = project.run(*(["--torchmem-update"] if update else []))
    found += trouble(result)
    if "\x1b[2J" in result.output:
        found.append("an escape of the file is on the terminal")
    if not update and content and file.read_bytes() != content:
        found.append("the file was changed by a run that only reads it")
    if update and kind == "text" and result.status == 0:
        found += trouble(project.run())
        json.loads(file.read_text())
    if time.process_time() - started > 5:
        found.append("it took longer than 5 s")
    return [f"{kind}: {line}" for line in found] + ([result.output[-2000:]] if found else [])
