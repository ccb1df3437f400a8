"""The host that a fake cpu stands for: what of a machine changes the bytes its kernels take."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from pytest_torchmem.torch_private.names import TORCH_VERSION

#: The oneDNN of each torch that has another than the one before it: third_party/ideep/mkl-dnn.
_RELEASES = {(2, 15): (3, 13), (2, 13): (3, 12), (2, 12): (3, 11), (2, 11): (3, 10)}
_CHECKED_RELEASES = frozenset(_RELEASES.values())

#: The instruction sets that oneDNN tells apart (src/cpu/x64/cpu_isa_traits.hpp), the most capable
#: first, and the flag of the processor that each needs.
_INSTRUCTIONS = {
    "avx512_core_amx": "amxtile",
    "avx512_core_fp16": "avx512fp16",
    "avx512_core_bf16": "avx512bf16",
    "avx512_core_vnni": "avx512vnni",
    "avx512_core": "avx512bw",
    "avx2_vnni": "avxvnni",
    "avx2": "avx2",
    "sse41": "sse41",
}
_CHECKED = {
    torch.float32: ("avx512_core_bf16", "avx512_core_vnni", "avx512_core"),
    torch.bfloat16: ("avx512_core_bf16",),
}

_HERE = "here"

_GUESSED_CACHES = (32 * 1024, 512 * 1024)
"""What oneDNN takes where it cannot tell; src/cpu/platform.cpp, ``get_per_core_cache_size``."""


class Host(NamedTuple):
    """A CPU host. ``capability`` is the vector instruction set that ATen dispatches on, and
    ``instructions`` the one that oneDNN does.
    """

    name: str
    threads: int
    capability: str
    """``"DEFAULT"``, ``"AVX2"`` or ``"AVX512"``, as ``torch.backends.cpu.get_cpu_capability()``."""
    onednn: tuple[int, ...]
    """Major and minor version; empty where oneDNN is not built in, or switched off."""
    instructions: str
    l1: int
    l2: int
    """Bytes of a core's share of the data caches, by which oneDNN decides how large blocks are."""

    def is_checked(self, dtype: torch.dtype) -> bool:
        """Return whether oneDNN's memory for ``dtype`` was compared with the allocator there."""
        return self.onednn in _CHECKED_RELEASES and self.instructions in _CHECKED.get(dtype, ())

    @property
    def is_this_machine(self) -> bool:
        """Whether libraries that run here can be asked about it."""
        return self.name == _HERE

    @property
    def computes_in_float16(self) -> bool:
        """Whether it has vector instructions for float16; ``mkldnn_fp16_device_check``."""
        return self.instructions in ("avx512_core_amx", "avx512_core_fp16")

    @property
    def computes_in_bfloat16(self) -> bool:
        """Whether oneDNN takes bfloat16 there; ``mkldnn_bf16_device_check``."""
        return self.instructions.startswith("avx512_core")

    @property
    def unchecked(self) -> str:
        """Return why figures are estimates on a CPU where they were not compared."""
        version = ".".join(map(str, self.onednn))
        return (
            "oneDNN's workspaces were checked on CPUs with AVX-512, in bfloat16 with AVX512-BF16, "
            f"without AMX, and with oneDNN 3.10 to 3.13; this CPU has {self.instructions} and "
            f"oneDNN {version}"
        )


REFERENCE = Host(
    name="reference",
    threads=8,
    capability="AVX512",
    onednn=next(found for first, found in _RELEASES.items() if first <= TORCH_VERSION),
    instructions="avx512_core_bf16",
    l1=48 * 1024,
    l2=1024 * 1024,
)
"""The host of every snapshot, so that one written anywhere passes anywhere. Its oneDNN is that of
torch's version, whatever the build that runs has.
"""


def this_machine() -> Host:
    """Return the machine that runs this, with its present settings."""
    enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    l1, l2 = _caches()
    built = re.search(r"MKL-DNN v(\d+)\.(\d+)", torch.__config__.show())
    version = (int(built[1]), int(built[2])) if built else (0, 0)
    return Host(
        name=_HERE,
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        onednn=version if enabled else (),
        instructions=_instructions(),
        l1=l1,
        l2=l2,
    )


def _capabilities() -> dict[str, int]:
    """What torch's cpuinfo finds, from torch 2.12 on."""
    read = getattr(torch.cpu, "get_capabilities", dict)
    return dict(read())


def _instructions() -> str:
    """The most capable instruction set within ``ONEDNN_MAX_CPU_ISA``, "unknown" without flags."""
    flags = {name for name, present in _capabilities().items() if present is True}
    if not flags:
        try:
            text = Path("/proc/cpuinfo").read_text()
        except OSError:
            return "unknown"
        flags = set("".join(re.findall(r"^flags\s*:(.*)", text, re.M)[:1]).split())
    present = {flag.replace("_", "") for flag in flags}
    names = list(_INSTRUCTIONS)
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").lower()
    allowed = names[names.index(most) :] if most in names else names
    return next((name for name in allowed if _INSTRUCTIONS[name] in present), "unknown")


def _caches(directory: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[int, int]:
    """Bytes of a core's share of its first two data caches, by Linux or else by torch."""
    sizes: dict[int, int] = {}
    sharing: dict[int, int] = {}
    try:
        for entry in sorted(directory.glob("index*")):
            if (entry / "type").read_text().strip() == "Instruction":
                continue
            level = int((entry / "level").read_text())
            sizes[level] = int((entry / "size").read_text().strip().removesuffix("K")) * 1024
            sharing[level] = len(_numbers((entry / "shared_cpu_list").read_text()))
        return sizes[1], sizes[2] // max(1, sharing[2] // sharing[1])
    except (OSError, ValueError, KeyError):
        known = _capabilities()
        l1, l2 = _GUESSED_CACHES
        return known.get("l1d_cache_size") or l1, known.get("l2_cache_size") or l2


def _numbers(text: str) -> list[int]:
    spans = [part.split("-") for part in text.strip().split(",")]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]
