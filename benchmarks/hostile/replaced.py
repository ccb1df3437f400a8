"""Tests that replace functions of Python, and do not always put them back."""

import random
from typing import Any

from benchmarks.hostile.project import Project, trouble

FUNCTIONS = (
    "json.dumps", "json.loads", "os.replace", "os.fsync", "os.open", "os.chmod", "os.unlink",
    "io.open", "pickle.dumps", "pickle.loads", "hashlib.sha256", "fcntl.flock",
    "secrets.token_hex", "signal.signal", "signal.getsignal", "os.listdir", "os.scandir",
    "dataclasses.replace", "os.path.relpath", "os.path.realpath", "os.path.lexists", "time.time",
    "time.monotonic", "time.sleep", "inspect.signature", "inspect.getsource",
    "threading.Thread.start", "tempfile.gettempdir", "random.random", "textwrap.wrap",
    "shlex.quote", "logging.getLogger", "warnings.warn", "subprocess.run", "html.escape",
    "os.getpid", "pathlib.Path.open", "pathlib.Path.read_bytes", "pathlib.Path.write_text",
    "pathlib.Path.glob", "pathlib.Path.is_symlink", "tabulate.tabulate", "mmap.mmap",
    "collections.Counter", "builtins.open", "os.set_blocking",
)  # fmt: skip
"""What pytest itself can do without between the end of a test and its own."""
ANSWERS = ("1 / 0", "None", "7", "b''", "''", "[]", "(_ for _ in ()).throw(OSError(28, 'full'))")
TEST = """
def test_{name}(torchmem):
    torchmem.check({size}, "{name}", device="cpu")
"""
REPLACES = """
import pytest
replaced = pytest.MonkeyPatch()
def replaces(*given, **named):
    return {answer}
def test_neighbour({torchmem}):
    {first}
    replaced.setattr("{function}", replaces)
    {last}
"""
PUT_BACK = """
import pytest
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        if hasattr(item.module, "replaced"):
            item.module.replaced.undo()
"""


def hostile_replaced(project: Project, chance: random.Random) -> list[str]:
    """Replace a function, for a test or for good: no failure is lost, and no snapshot is broken."""
    function, answer = chance.choice(FUNCTIONS), chance.choice(ANSWERS)
    put_back, checks = chance.random() < 0.5, chance.choice(("", "first", "last"))
    if put_back:
        conftest = project.path / "conftest.py"
        conftest.write_text(conftest.read_text() + PUT_BACK)
    check = 'torchmem.check(500, "n", device="cpu")'
    neighbour = REPLACES.format(
        answer=answer,
        function=function,
        torchmem="torchmem" if checks else "",
        first=check if checks == "first" else "pass",
        last=check if checks == "last" else "pass",
    )
    place = chance.randrange(3)
    sizes, quiet = {"a": 1000, "b": 2000}, neighbour.partition("    replaced.setattr")[0]
    quiet += f"    {check}\n" if checks == "last" else ""
    _write(project, sizes, quiet, place)
    found = trouble(project.run("--torchmem-update"))
    before = project.entries()
    sizes["b"] = chance.choice((2000, 3000))
    _write(project, sizes, neighbour, place)
    update = chance.random() < 0.5
    reports = ["--torchmem-json=r.json", "--torchmem-markdown=r.md", "--torchmem-html=pages"]
    result = project.run(*(["--torchmem-update"] if update else reports))
    found += trouble(result)
    try:
        after = project.entries()
    except ValueError as error:
        after, found = {}, [*found, f"the snapshot is broken: {error}"]
    for key, entry in before.items():
        now = after.get(key)
        size = sizes.get(key[1].removeprefix("test_"), 500)
        if now is None or now["forward_peak"][0] not in (entry["forward_peak"][0], size):
            found.append(f"{key} was {entry['forward_peak']}, and is {now and now['forward_peak']}")
    if not update:
        if after != before:
            found.append("snapshots changed without an update")
        if sizes["b"] == 3000 and result.status == 0:
            found.append("something grew, and the run passed")
    elif result.status == 0 and _size_of(after, "b") != sizes["b"]:
        found.append("the update passed, and did nothing")
    others = {test.rpartition("_")[2]: said for test, said in result.outcomes.items()}
    right = "passed" if update or sizes["b"] == 2000 else "failed"
    if put_back and (others.get("a"), others.get("b")) != ("passed", right):
        found.append(f"{others}, although all was put back")
    if " in " not in result.output.rstrip().rpartition("\n")[2]:
        found.append("pytest's summary is not there")
    what = f"{function} gives {answer}, {checks or 'no check'}, {put_back=}, {update=}, {place}"
    return [f"{what}: {line}" for line in found] + ([result.output[-2500:]] if found else [])


def _write(project: Project, sizes: dict[str, int], neighbour: str, place: int) -> None:
    parts = [TEST.format(name=name, size=size) for name, size in sizes.items()]
    parts.insert(place, neighbour)
    (project.path / "test_net.py").write_text("".join(parts))


def _size_of(entries: dict[tuple[str, str], dict[str, Any]], name: str) -> int | None:
    entry = entries.get(("test_net", f"test_{name}"))
    return None if entry is None else entry["forward_peak"][0]
