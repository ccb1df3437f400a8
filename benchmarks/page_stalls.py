"""``python -m benchmarks.page_stalls``: whether a page of 100,000 events stalls in Chromium.

A script on the page moves the pointer over the picture, scrolls the page and changes the grouping,
one step a frame. Chromium's own observer of long tasks (50 ms and more, w3.org/TR/longtasks) and
the time between frames are printed. Needs Chromium; no display.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.profile.profile import MemoryProfile

MARK = "stalls of the page: "
SCRIPT = """
<script>
addEventListener("load", () => setTimeout(() => {
  const tasks = [], gaps = [], taken = {hover: [], list: [], scroll: [], regroup: []};
  const timed = (name, action) => {
    const start = performance.now();
    action();
    document.body.offsetHeight;  // the layout belongs to it
    taken[name].push(performance.now() - start);
  };
  new PerformanceObserver(list => list.getEntries().forEach(one => tasks.push(one.duration)))
    .observe({entryTypes: ["longtask"]});
  const ask = requestAnimationFrame.bind(window);
  window.requestAnimationFrame = callback => ask(now => timed("list", () => callback(now)));
  const choice = document.querySelector("select");
  const step = frame => {
    const over = document.querySelector(".u-over");  // a new one for each grouping
    const box = over.getBoundingClientRect();
    const at = {clientX: box.left + box.width * (frame % 100) / 100, clientY: box.top + 100};
    timed("hover", () => over.dispatchEvent(new MouseEvent("mousemove", {...at, bubbles: true})));
    if (frame >= 200) timed("scroll", () => scrollBy(0, frame % 100 < 50 ? 60 : -60));
    if (frame % 60 == 59) timed("regroup", () => {
      choice.selectedIndex = (choice.selectedIndex + 1) % choice.options.length;
      choice.dispatchEvent(new Event("change", {bubbles: true}));
    });
  };
  let last = performance.now(), frame = 0;
  ask(function next(now) {
    gaps.push(now - last); last = now;
    if (frame < 400) { step(frame++); ask(next); }
    else setTimeout(() => console.log("MARK" + JSON.stringify(
      {frames: gaps.length, longest_gap: Math.max(...gaps.slice(2)), long_tasks: tasks,
       taken})), 300);
  });
}, 500));
</script>
"""


class Block(nn.Module):
    """Many small operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = (self.layer(x).sin() + x).cos()
        return x


def profile_of(steps: int) -> MemoryProfile:
    """Return the profile of training steps of 48 blocks, about 47,000 events each."""
    model = nn.Sequential(*(Block() for _ in range(48)))

    def run() -> None:
        own = model.to("cuda")
        optimizer = torch.optim.AdamW(own.parameters(), foreach=False)
        for _ in range(steps):
            own(torch.zeros(64, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return trace(run, device="cuda")


def stalls(page: Path, browser: str, folder: Path) -> dict[str, Any]:
    """Return what the page's script saw in Chromium."""
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    command = [browser, *options, f"--user-data-dir={folder}", "--window-size=1200,1000"]
    process = subprocess.Popen(
        [*command, page.as_uri()], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    end = time.monotonic() + 120
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if MARK in line:
                found: dict[str, Any] = json.JSONDecoder().raw_decode(line.partition(MARK)[2])[0]
                return found
            if time.monotonic() > end:
                break
    finally:
        process.kill()
        process.wait()
    raise SystemExit("the page's script has said nothing")


def main() -> None:
    """Print how many events there are, and what the browser saw, page by page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs Chromium")
    version = subprocess.run([browser, "--version"], capture_output=True, text=True, check=True)
    profile = profile_of(options.steps)
    print(f"{len(profile.timeline.events):,} events; {' '.join(version.stdout.split()[:2])}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "page.html"
        text = profile.to_html()
        script = SCRIPT.replace("MARK", MARK)
        page.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
        for run in range(options.runs):
            found = stalls(page, browser, Path(folder) / f"browser-{run}")
            longest = max(found["long_tasks"], default=0)
            for name, taken in found["taken"].items():
                print(f"{name}: median {median(taken):.1f} ms, longest {max(taken):.1f} ms")
            print(
                f"{found['frames']} frames, longest {found['longest_gap']:.0f} ms; "
                f"{len(found['long_tasks'])} long tasks, longest {longest:.0f} ms"
            )


if __name__ == "__main__":
    main()
