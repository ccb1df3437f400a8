"""Signals in the middle of runs, two and three runs at once, and files that are no snapshots."""

import contextlib
import json
import os
import random
import signal
import time

from benchmarks.hostile.project import Project, Result, trouble

_LONGEST = 10.0
"""Seconds of processor time that a run over a small file may take."""
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
        return [*found, f"after {number.name}: {error}; {left}"]
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


DEEP = ('{"a":' * 1000 + "1" + "}" * 1000, "[" * 500 + "]" * 500)
NOWHERE = ("1e999", "-1e400", "1" + "0" * 5000, '"\\ud800"', "NaN", "Infinity", *DEEP)
"""What no place of a file may hold."""
HOSTILE = (
    *NOWHERE, "1" + "0" * 400, "true", "null", "[]", "{}", "-1", "9223372036854775808", "1e308",
    '"7"', '"1e999999999"', '"9999999999999999999999%"', '""',
)  # fmt: skip
ESCAPES = ('"\\u001b[2J\\n"', '"a\\rb"', '"\\u202e<b>@all"')
_FIGURES = ("peak", "forward_peak", "backward_peak", "baseline")
_IDENTITY = ("test", "device", "name", "gpu", "torch_series", "world_size", "rank")
_PLACES = (
    _FIGURES,
    _IDENTITY,
    ("tolerance",),
    ("reason", "test", "name"),
    ("torch", "workload", "ours", "measured", "facts"),
)


def may_hold(place: str, value: str) -> bool:
    """Tell whether a place of an entry may hold a hostile value, as the documentation has it."""
    if value in NOWHERE:
        return False
    plain = json.loads(value)
    if place in _FIGURES:  # bytes, and at most those of 63 bits: no such value is one
        return False
    if place in ("test", "device", "torch"):
        return isinstance(plain, str) and plain != ""
    if place in ("name", "gpu", "torch_series", "workload"):
        return isinstance(plain, str)
    if place == "reason":
        return plain is None or isinstance(plain, str)
    if place == "tolerance":
        return plain in (None, {}, "7")
    return place == "ours" or (plain == {} and place in ("measured", "facts"))


def hostile_file(project: Project, chance: random.Random) -> list[str]:
    """Put a value that means harm into a snapshot, or something else in its place."""
    (project.path / "test_net.py").write_text(_module(range(2), 1000))
    found = trouble(project.run("--torchmem-update"))
    file = project.file("test_net")
    data = json.loads(file.read_text())
    put = {}
    for _ in range(chance.randint(1, 2)):
        values = chance.choice((HOSTILE, HOSTILE, ESCAPES))
        put[chance.choice(chance.choice(_PLACES))] = chance.choice(values)
    data["entries"][0] |= {place: f"HERE {place}." for place in put}
    text = json.dumps(data)
    for place, value in put.items():
        text = text.replace(f'"HERE {place}."', value)
    kind = chance.choice(("text",) * 20 + ("fifo", "directory", "link", "bytes"))
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
    is_gone = chance.random() < 0.3  # what was written into the entry is printed as it goes
    (project.path / "test_net.py").write_text(_module(range(int(is_gone), 2), 1000))
    update = chance.random() < 0.5
    content = file.read_bytes() if kind in ("text", "bytes") else b""
    result, seconds = _timed(project, *(["--torchmem-update"] if update else []))
    found += trouble(result)
    if any(not c.isprintable() for c in result.output.replace("\n", "").replace("\t", "")):
        found.append("what moves a cursor or hides text is on the terminal")
    if seconds > _LONGEST:
        found.append(f"it took {seconds:.0f} s")
    if content:
        valid = kind == "text" and all(may_hold(*one) for one in put.items())
        if (result.outcomes.get("test_net.py::test_1") == "passed") != valid:
            found.append(f"the file was {'refused' if valid else 'read'}")
        if not (update and valid) and file.read_bytes() != content:
            found.append("the file was changed")
        if valid:
            found += _wrong_reading(project, set(put), result, update=update, is_gone=is_gone)
    said = {place: value[:40] for place, value in put.items()}
    head = f"{kind}, {said}, update {update}, gone {is_gone}"
    return [f"{head}: {line}" for line in found] + ([result.output[-2000:]] if found else [])


def _wrong_reading(
    project: Project, places: set[str], result: Result, *, update: bool, is_gone: bool
) -> list[str]:
    """Return what was made otherwise of a file that may be read than must be."""
    found = []
    test = result.outcomes.get("test_net.py::test_0")
    if update:
        if result.status:
            found.append(f"status {result.status} of an update")
        entries = set(project.entries())
        if entries != {("test_net", f"test_{n}") for n in range(int(is_gone), 2)}:
            found.append(f"after an update there are {sorted(entries)}")
        again = project.run()
        if again.status:
            found.append(f"status {again.status} after an update")
    elif not is_gone and "workload" not in places:
        right = "failed" if places & set(_IDENTITY) - _same(project) else "passed"
        if test != right:
            found.append(f"test_0 {test}, not {right}")
    return found


def _same(project: Project) -> set[str]:
    """Return the empty parts of identities, which are as good as none."""
    data = json.loads(project.file("test_net").read_text())
    return {name for entry in data["entries"] for name in _IDENTITY if entry.get(name) == ""}


def _timed(project: Project, *options: str) -> tuple[Result, float]:
    """Return a run's result and the seconds of processor time that it took."""
    before = os.times()
    result = project.run(*options)
    after = os.times()
    return result, sum(after[2:4]) - sum(before[2:4])
