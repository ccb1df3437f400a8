"""The environment of a command that finds a GPU of the catalogue in the place of a real one.

It is built for the installed CUDA build of torch, with the machine's compiler. ``nm`` tells which
functions of CUDA the installed libraries need. Those that the sources do not define do nothing: one
that would write a size or a count writes 0, one that creates a handle makes one. Where a caller
reads such an answer it is noted (``notes.c``), because the real library might have given another;
for each library of CUDA that is needed there is an empty shared object of its name, so that the
loader looks for none of NVIDIA's.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_torchmem.cudnn import driver
from pytest_torchmem.cudnn.library import folder as cache_folder
from pytest_torchmem.cudnn.questions import PINNED, Version, find_installed
from pytest_torchmem.errors import UsageError
from pytest_torchmem.targets.gpus import Gpu

_MOST_DEVICES = 16
"""``DEVICES`` of runtime.c."""


def stand_in_environment(gpu: Gpu, devices: int = 1) -> dict[str, str]:
    """Return this process's environment, changed so that torch finds GPUs of a kind.

    The stand-in is built at first use. Raises ``UsageError`` where that cannot be: no CUDA build of
    torch, no compiler, no headers, another platform, a GPU that this build has no kernels for.
    """
    installation = find_installation()
    architecture = _architecture(gpu, installation)
    place = build(installation)
    properties = driver.device_properties(gpu.capability, gpu.multiprocessors)
    described = {
        "NAME": gpu.product,
        "CAPABILITY": "{}{}".format(*gpu.capability),
        "MULTIPROCESSORS": gpu.multiprocessors,
        "THREADS": gpu.threads_per_multiprocessor,
        "MEMORY": gpu.memory,
        "CONTEXT": gpu.context,
        "DEVICES": max(0, min(devices, _MOST_DEVICES)),
        "BINARY": architecture,
        "BLOCK_SHARED": properties["maxSharedMemoryPerBlockOptin"],
        "BLOCKS": properties["maxCtasPerSM"],
        "L2": properties["l2CacheSize"],
        "RUNTIME": installation.cuda[0] * 1000 + installation.cuda[1] * 10,
        **_cudnn(installation, place, properties),
    }
    resources = kernel_resources(installation, place, architecture)
    if resources is not None:
        described["RESOURCES"] = resources
    preloaded = sorted(place.glob("lib*.so*"), key=lambda path: (path.name != MAIN, path.name))
    already = os.environ.get("LD_PRELOAD", "").split(":")
    kept = [one for one in already if one and Path(one).parent.parent != place.parent]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("STAND_IN_")},
        **{f"STAND_IN_{name}": str(value) for name, value in described.items()},
        "LD_PRELOAD": ":".join([*map(str, preloaded), *kept]),
        "TRITON_LIBCUDA_PATH": str(place),
    }


def _architecture(gpu: Gpu, installation: "Installation") -> int:
    """Return which of the build's kernels a GPU runs: the newest of its major version."""
    own = gpu.capability[0] * 10 + gpu.capability[1]
    built = kernel_architectures(installation)
    fitting = [one for one in built if one <= own and one // 10 == gpu.capability[0]]
    if not fitting:
        raise UsageError(
            f"torch {installation.version} has no kernels for {gpu.name} (sm_{own}): "
            f"it has {', '.join(f'sm_{one}' for one in built)}"
        )
    return max(fitting)


def _cudnn(
    installation: "Installation", place: Path, properties: Mapping[str, object]
) -> dict[str, str]:
    """Describe the installed cuDNN, which answers in a process of its own, without the stand-in.
    Without one, the version that torch requires is there and answers nothing.
    """
    installed = find_installed()
    if isinstance(installed, str):
        series = ".".join(installation.version.split(".")[:2])
        return {"CUDNN": _cudnn_number(PINNED.get(series, max(PINNED.values())))}
    beside = place / "driver"
    beside.mkdir(exist_ok=True)
    (beside / driver.SONAME).write_bytes(driver.shared_object())
    command = (
        *("env", "-u", "LD_PRELOAD", f"LD_LIBRARY_PATH={installed.library_path(beside)}"),
        *(str(place / CUDNN_PROCESS), str(installed.library), json.dumps(properties)),
    )
    return {"CUDNN": _cudnn_number(installed.version), "CUDNN_PROCESS": shlex.join(command)}


def _cudnn_number(version: Version) -> str:
    """Return what ``cudnnGetVersion`` gives."""
    major, minor, patch = version
    return str(major * 10000 + minor * 100 + patch)


#: Where sizes and counts are written, by the documented signatures: argument and bytes.
_WRITES: tuple[tuple[str, dict[int, int]], ...] = (
    (r"cusolverDn[SDCZ](getrf|potrf|geqrf)_bufferSize", {5: 4}),
    (r"cusolverDn[SDCZ](orgqr|ungqr|syevd|heevd|syevjBatched|heevjBatched)_bufferSize", {7: 4}),
    (r"cusolverDn[SDCZ](ormqr|unmqr|gesvdjBatched)_bufferSize", {11: 4}),
    (r"cusolverDn[SDCZ]sytrf_bufferSize", {4: 4}),
    (r"cusolverDn[SDCZ]gesvd_bufferSize", {3: 4}),
    (r"cusolverDn[SDCZ]gesvdj_bufferSize", {12: 4}),
    (r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize", {16: 4}),
    (r"cusolverDnX(sytrs|syevd|syevBatched)_bufferSize", {11: 8, 12: 8}),
    (r"cusolverDnX(potrf|getrf)_bufferSize", {8: 8, 9: 8}),
    (r"cusolverDnXgeqrf_bufferSize", {10: 8, 11: 8}),
    (r"cusolverDnXgeev_bufferSize", {17: 8, 18: 8}),
    (r"cusparseXbsrs[vm]2_zeroPivot", {2: 4}),
    (r"cusparse.bsrsv2_bufferSize", {11: 4}),
    (r"cusparse.bsrsm2_bufferSize", {13: 4}),
    (r"cusparse.csrgeam2_bufferSizeExt", {19: 8}),
    (r"cusparseXcsrgeam2Nnz", {13: 4}),
    (r"cusparseX(coo|csr)sort_bufferSizeExt", {6: 8}),
    (r"cusparseSpMatGetSize", {1: 8, 2: 8, 3: 8}),
    (r"cusparse(SpMV|SpSV)_bufferSize", {9: 8}),
    (r"cusparse(SpSM|SpMM|SDDMM)_bufferSize", {10: 8}),
    (r"cusparseSpGEMM_workEstimation|cusparseSpGEMM_compute", {9: 8}),
    (r"cusparseLtMatmulGetWorkspace", {2: 8}),
    (r"cusparseLtSpMMACompressedSize2", {2: 8, 3: 8}),
    (r"cudnnGetConvolution\w+WorkspaceSize", {6: 8}),
)
_CREATES = re.compile(
    r"Create(?!dBy)|^ncclCommRegister$|cusparseSpGEMM_createDescr|cusparseSp\w+_createDescr|RedOpCreate"
)
_CREATES_NOTHING = re.compile(r"ncclDevCommCreate|cudaGraph\w+")
#: What has no answer that a caller reads.
_QUIET = re.compile(
    r"cublas(Set|Create|Destroy|Lt\w+(Create|Destroy|SetAttribute))|cudaFuncSet|cupti"
    r"|cudnn(Create|Destroy|Set)|cuda(Event|Stream|Profiler|Graph)|nvrtc|nccl(Group|Comm)"
    r"|cusparse(Create|Destroy|Set)|cusolverDn(Create|Destroy|Set)|cufft(Set|Destroy)"
)
_ARGUMENTS = ", ".join(f"char *a{number}" for number in range(20))


def function(name: str) -> str:
    """Return the definition of a function that does nothing and returns success."""
    writes = next((where for pattern, where in _WRITES if re.fullmatch(pattern, name)), {})
    body = "" if _QUIET.match(name) else f'stand_in_note("{name}"); '
    for argument, nbytes in writes.items():
        kind = "int" if nbytes == 4 else "long"
        body += f"if (a{argument}) *({kind} *)a{argument} = 0; "
    if _CREATES.search(name) and not _CREATES_NOTHING.fullmatch(name):
        body += "*(void **)a0 = malloc(512); "
    return f"long {name}({_ARGUMENTS}) {{ {body}return 0; }}\n"


MAIN = "libstand_in.so"
CUDNN_PROCESS = "cudnn-process"
_SOURCES = Path(__file__).parent / "sources"
_HEADERS = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
"""Those that torch's own requirements install have no ``crt``; triton's have."""
_HOMES = ("CUDA_HOME", "CUDA_PATH")
_FUNCTION = re.compile(
    r"(__cuda|cuda|cublas|cusparse|cusolver|cufft|curand|nccl|nvrtc|cudnn|cuFile|nvtx|cupti|nvml"
    r"|nvshmem|cu[A-Z])\w+"
)
_LIBRARY = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cusparse|cusparseLt|cusolver|cufft|curand|nccl|nvrtc|cudnn"
    r"|cufile|cupti|nvshmem_host)\.so\.\d+"
)
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")
"""What torch and triton open by name."""
_ARCHITECTURES = re.compile(rb"sm_\d+a?(?: (?:sm|compute)_\d+a?)+")


@dataclass(frozen=True, slots=True)
class Installation:
    """The CUDA build of torch that this interpreter would import, without importing it."""

    torch: Path
    """Its folder in ``site-packages``."""
    version: str
    cuda: tuple[int, int]

    @property
    def libraries(self) -> list[Path]:
        """Its libraries, and those of installed packages that require torch."""
        return [*sorted((self.torch / "lib").glob("*.so")), *sorted(_extensions())]

    @property
    def include(self) -> Path:
        """The folder with CUDA's headers of the same major version; raises ``UsageError``."""
        site = self.torch.parent
        places = [
            *site.glob("nvidia/*/include"),
            site / "triton/backends/nvidia/include",
            *(Path(home) / "include" for name in _HOMES if (home := os.environ.get(name))),
            Path("/usr/local/cuda/include"),
        ]
        for place in places:
            if all((place / name).is_file() for name in _HEADERS):
                text = (place / _HEADERS[1]).read_text(encoding="utf-8", errors="replace")
                found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
                if found is not None and int(found[1]) // 1000 == self.cuda[0]:
                    return place
        raise UsageError(
            f"the stand-in needs CUDA's headers, version {self.cuda[0]}: "
            "pip install triton, or nvidia-cuda-runtime"
        )


def find_installation() -> Installation:
    """Return the torch that is installed; raises ``UsageError`` for what cannot be served."""
    if sys.platform != "linux":
        raise UsageError("the stand-in runs on Linux alone, and this is " + sys.platform)
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise UsageError("the stand-in needs a CUDA build of torch, and torch is not installed")
    torch = Path(found.origin).parent
    text = (torch / "version.py").read_text(encoding="utf-8")
    version, cuda = (
        re.search(rf"^{name}\b.*= '([^']*)'", text, re.MULTILINE)
        for name in ("__version__", "cuda")
    )
    name = version[1] if version is not None else "of an unknown version"
    if cuda is None:
        raise UsageError(
            f"the stand-in needs a CUDA build of torch, and torch {name} is a build for the CPU: "
            f"pip install 'torch==={name.partition('+')[0]}'"
        )
    major, minor = (int(part) for part in cuda[1].split(".")[:2])
    return Installation(torch, name, (major, minor))


def _extensions() -> Iterator[Path]:
    """Yield shared objects of packages that require torch: their functions are needed as well."""
    for distribution in importlib.metadata.distributions():
        if any(re.match(r"torch\b(?!\w|-)", one) for one in distribution.requires or ()):
            for file in distribution.files or ():
                path = Path(str(distribution.locate_file(file)))
                if path.suffix == ".so" and path.is_file():
                    yield path


def build(installation: Installation) -> Path:
    """Return the folder of the stand-in for an installation, built unless it was before. Raises
    ``UsageError`` without a compiler, binutils or CUDA's headers.
    """
    for tool in ("gcc", "nm", "objdump"):
        if shutil.which(tool) is None:
            raise UsageError(f"the stand-in is compiled at first use, and {tool} is not installed")
    libraries = installation.libraries
    seen = hashlib.sha256(installation.version.encode())
    for path in (*libraries, *sorted(_SOURCES.iterdir()), Path(__file__)):
        status = path.stat()
        seen.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
    place = cache_folder() / "stand-in" / f"{installation.version}-{seen.hexdigest()[:12]}"
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            out = Path(made) / "built"
            out.mkdir()
            _compile(installation, libraries, out, Path(made))
            try:
                out.rename(place)
            except OSError:  # another process was faster
                if not place.is_dir():
                    raise
    return place


def _compile(installed: Installation, libraries: Sequence[Path], out: Path, scratch: Path) -> None:
    # Which functions of CUDA libraries need, and which libraries of CUDA.
    paths = [str(path) for path in libraries]
    symbols = (line.split()[-1].split("@")[0] for line in _run("nm", "-Du", *paths) if line.split())
    functions = {name for name in symbols if _FUNCTION.fullmatch(name)}
    entries = (line.split() for line in _run("objdump", "-p", *paths))
    needed = {one[1] for one in entries if one[:1] == ["NEEDED"] and _LIBRARY.fullmatch(one[1])}
    flags = ["-O1", "-fPIC", "-w", f"-I{installed.include}", f"-I{_SOURCES}"]
    objects = []
    for source in sorted(_SOURCES.glob("*.c")):
        if source.stem != "cudnn_process":
            objects.append(str(scratch / f"{source.stem}.o"))
            _run("gcc", *flags, "-c", str(source), "-o", objects[-1])
    defined = {line.split()[-1] for line in _run("nm", "--defined-only", *objects) if line.split()}
    rest = scratch / "rest.c"
    rest.write_text(
        '#include <stdlib.h>\n#include "stand_in.h"\n'
        + "".join(function(name) for name in sorted(functions - defined)),
        encoding="utf-8",
    )
    objects.append(str(scratch / "rest.o"))
    _run("gcc", *flags, "-fno-builtin", "-c", str(rest), "-o", objects[-1])
    main = ["-shared", "-o", str(out / MAIN), *objects, f"-Wl,-soname,{MAIN}", "-lpthread"]
    _run("gcc", *main)
    for name in sorted({*needed, *_ALWAYS}):
        # A library's version node is named after it; only nvshmem's is not.
        node = "NVSHMEM" if "nvshmem" in name else name.replace("-", "_")
        (scratch / "version.map").write_text(f"{node} {{ }};\n", encoding="utf-8")
        _run(
            *("gcc", "-shared", "-x", "c", os.devnull, "-o", str(out / name)),
            *(f"-Wl,-soname,{name}", f"-Wl,--version-script={scratch / 'version.map'}"),
            *("-Wl,--no-as-needed", f"-L{out}", f"-l:{MAIN}", "-Wl,-rpath,$ORIGIN"),
        )
    process = [str(_SOURCES / "cudnn_process.c"), "-o", str(out / CUDNN_PROCESS), "-ldl"]
    _run("gcc", "-O1", "-w", *process)


def _run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise UsageError(f"the stand-in could not be built: {done.stderr.strip()[-2000:]}")
    return done.stdout.splitlines()


def kernel_architectures(installation: Installation) -> list[int]:
    """Return the compute capabilities that the build has kernels for, such as [75, 80, 90].
    ``torch.cuda.get_arch_list`` reads the same text (``THCPModule_getArchFlags``).
    """
    with (
        (installation.torch / "lib" / "libtorch_python.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        found = _ARCHITECTURES.search(content)
        text = found[0].decode() if found is not None else ""
    return sorted(int(number) for number in re.findall(r"sm_(\d+)", text))


def kernel_resources(installation: Installation, place: Path, architecture: int) -> Path | None:
    """Return the file with the registers and shared memory of each kernel, which occupancy follows
    from; None without triton's ``cuobjdump``. Lines are ``registers shared threads name``.
    """
    path = place / f"resources-{architecture}"
    dump = installation.torch.parent / "triton/backends/nvidia/bin/cuobjdump"
    if path.is_file() or not dump.is_file():
        return path if path.is_file() else None
    rows = []
    for name in ("libtorch_cuda.so", "libtorch_cuda_linalg.so"):
        library = str(installation.torch / "lib" / name)
        kernel = ""
        for line in _run(str(dump), "-res-usage", "-arch", f"sm_{architecture}", library):
            if match := re.match(r"\s*Function (\S+):", line):
                kernel = match[1]
            elif match := re.match(r"\s*REG:(\d+) STACK:\d+ SHARED:(\d+)", line):
                rows.append(f"{match[1]} {match[2]} 1024 {kernel}\n")
    with tempfile.NamedTemporaryFile("w", dir=place, delete=False, encoding="utf-8") as file:
        file.writelines(sorted(rows))
    os.replace(file.name, path)
    return path
