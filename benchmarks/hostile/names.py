"""Names that mean harm in every report, and reports that cannot be written.

Ids are those that pytest escapes unless it is told not to; the oracle has sizes and outcomes alone.
"""

import json
import os
import random
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

from benchmarks.hostile.project import Project, trouble

PIECES = (
    "a", "é", "a b", "\n", "\t", "\r", "\x1b[2J", "\x07", "\u202e", "\u2028", "\u200b", "🙂", "|",
    "`", "``", "@mention", "#1", "</script><script>x", "<img src=x>", "&amp;", "-->", "]]>",
    "::error::x", "::warning::y", "%0A", "[x](http://y)", "$(id)", "'", '"', "\\", "\\n", "**",
    "- ", "::", "[1]", "]", "x" * 3000, "1" * 3000, "a." * 1000, "0x7f001234abcd",
    "<!-- pytest-torchmem -->",
)  # fmt: skip
PLACES = (
    "test_net",
    "te st_net",
    "@own/test_net",
    "[1]/test_net",
    "-x/test_net",
    "ü\u202e/test_net",
)
TEST = """import pytest
@pytest.mark.parametrize("size,name", {cases!r}, ids={ids!r})
def test_it(torchmem, size, name):
    torchmem.check(size, "w", device="cpu")
"""
_TARGETS = (
    "made",
    "new/made",
    "taken",
    "taken/made",
    "/dev/null",
    "/dev/full",
    "pipe",
    "nowhere/link",
)
_WRITABLE = ("made", "new/made", "/dev/null")
_ESCAPES = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support = true\n"


def hostile_names(project: Project, chance: random.Random) -> list[str]:
    """Give tests ids that mean harm: none is lost, and nothing that they say is done."""
    escaped = chance.random() < 0.5
    settings = "[pytest]\npython_files = *.py\n" + _ESCAPES * escaped
    (project.path / "pytest.ini").write_text(settings)
    number = chance.randint(1, 5)
    ids = [
        f"{index}{''.join(chance.choices(PIECES, k=chance.randint(1, 3)))}"
        for index in range(number)
    ]
    module = project.path / f"{chance.choice(PLACES)}.py"
    module.parent.mkdir(exist_ok=True)
    before = [chance.randint(1, 9) * 1000 for _ in ids]
    now = [size * chance.choice((1, 1, 2)) for size in before]
    _write(module, before, ids)
    found = trouble(project.run("--torchmem-update"))
    file = module.parent / "__torchmem__" / f"{module.stem}.json"
    stored = [entry["forward_peak"][0] for entry in json.loads(file.read_text("utf-8"))["entries"]]
    if sorted(stored) != sorted(before):
        found.append(f"{stored} of {before} were written")
    content = file.read_bytes()
    _write(module, now, ids)
    found += _reported(project, chance, [a < b for a, b in zip(before, now, strict=True)])
    if file.read_bytes() != content:
        found.append("snapshots changed without an update")
    return [f"{module.parent.name}/{module.stem} {ids}: {line:.300}" for line in found]


def _write(module: os.PathLike[str], sizes: Iterable[int], ids: Iterable[str]) -> None:
    text = TEST.format(cases=[(size, "n") for size in sizes], ids=list(ids))
    with open(module, "w", encoding="utf-8") as file:
        file.write(text)


def _reported(project: Project, chance: random.Random, grew: list[bool]) -> list[str]:
    (project.path / "taken").write_text("a file")
    os.mkfifo(project.path / "pipe")
    os.makedirs(project.path / "nowhere")
    (project.path / "nowhere" / "link").symlink_to("link")
    targets = {kind: chance.choice(_TARGETS) for kind in ("markdown", "html")}
    options = [
        f"--torchmem-{kind}={target}{f'-{kind}' if target in _WRITABLE[:2] else ''}"
        for kind, target in targets.items()
    ]
    if chance.random() < 0.5:
        options += ["--torchmem-proposal=" + chance.choice(("proposed", ".", "taken"))]
    on_github = {"GITHUB_ACTIONS": "true"} if chance.random() < 0.5 else {}
    result = project.run("--torchmem-json=report.json", *options, **on_github)
    found = trouble(result)
    fails = [outcome == "failed" for outcome in result.outcomes.values()]
    if sum(fails) != sum(grew):
        found.append(f"{sum(fails)} of {sum(grew)} failed")
    if any(grew) and result.status == 0:
        found.append("something grew, and the run passed")
    report = json.loads((project.path / "report.json").read_text())
    if len(report["checks"]) != len(grew):
        found.append(f"{len(report['checks'])} of {len(grew)} checks are in the report")
    for kind, target in targets.items():
        if target in _WRITABLE[:2] and not (project.path / f"{target}-{kind}").exists():
            found.append(f"no {kind}, with {targets}")
    found += _told(result.output, bool(on_github), sum(grew))
    found += _pages(project)
    for check in report["checks"]:
        if check["failed"]:
            found += _followed(project, check)
    return found


def _told(output: str, on_github: bool, failed: int) -> list[str]:
    """Return what the summary, which is the last of its kind, says and must not."""
    told = output.rpartition("memory (torchmem)")[2].partition("short test summary")[0]
    hidden = {c for c in told if not c.isprintable() and c != "\n"}
    commands = [line for line in told.split("\n") if line.startswith("::")]
    found = [f"the summary holds {hidden}"] if hidden else []
    # Failures of one cause share an annotation, whose title counts the others.
    others = [re.search(r" and (\d+) more(?:::|,)", command) for command in commands]
    annotated = len(commands) + sum(int(counted[1]) for counted in others if counted)
    if annotated != failed * on_github or not all(c.startswith("::error file=") for c in commands):
        found.append(f"commands to GitHub: {commands}")
    return found


def _pages(project: Project) -> list[str]:
    """Return what is wrong with the pages and the Markdown that were written."""
    found = []
    for path in (*project.path.rglob("*.html"), *project.path.rglob("made-markdown")):
        text = path.read_text("utf-8")
        if hidden := {c for c in text if not c.isprintable() and c != "\n"}:
            found.append(f"{path.name} holds {hidden}")
        if path.suffix == ".html" and ("<script>x" in text or "<img" in text):
            found.append(f"{path.name} holds the markup of a name")
        if path.suffix != ".html":
            rows = [line for line in text.splitlines() if line.startswith("|")]
            if not all(row.endswith("|") for row in rows) or "\n::" in text:
                found.append(f"{path.name} has broken rows")
    return found


def _followed(project: Project, check: dict[str, object]) -> list[str]:
    """Return what became of the command that a failure names."""
    command = str(check["advice"]).rpartition("pytest --torchmem-update")[2]
    result = project.run(
        "--torchmem-dry-run", *shlex.split(command), "--junitxml=j.xml", "-p", "junitxml"
    )
    ran = [outcome for test, outcome in result.outcomes.items() if test == check["nodeid"]]
    if ran != ["passed"]:
        return [f"{command} ran {len(result.outcomes)} tests, and {check['nodeid']} was {ran}"]
    ElementTree.parse(project.path / "j.xml")
    return trouble(result)
