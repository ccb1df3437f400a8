"""What the stand-in for the CUDA runtime needs, and what is said where that is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytest_torchmem.cli import main
from pytest_torchmem.errors import UsageError
from pytest_torchmem.stand_in import environment
from pytest_torchmem.stand_in.environment import function
from pytest_torchmem.targets.gpus import find_gpu


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_a_cpu_build_is_refused_in_one_sentence() -> None:
    command = [sys.executable, "-m", "pytest_torchmem.cli", "stand-in", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    version = torch.__version__.partition("+")[0]
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is a build for the CPU" in done.stderr
    assert f"pip install 'torch==={version}'" in done.stderr


def test_a_command_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stand-in", "--gpu", "h100"]) == 2
    assert "needs a command" in capsys.readouterr().err


def installation(place: Path, cuda: tuple[int, int] = (13, 0)) -> environment.Installation:
    (place / "torch" / "lib").mkdir(parents=True)
    return environment.Installation(place / "torch", "2.13.0", cuda)


def test_headers_are_those_of_the_builds_major_version(tmp_path, monkeypatch):
    torch_at = installation(tmp_path, (99, 0))
    with pytest.raises(UsageError, match="headers, version 99: pip install"):
        _ = torch_at.include
    for name, version in (("nvidia/without_crt", 99010), ("old", 98000), ("new", 99010)):
        include = tmp_path / name / "include"
        (include / "crt").mkdir(parents=True)
        for header in ("cuda.h", "crt/host_defines.h")[: 1 if "nvidia" in name else 2]:
            (include / header).touch()
        (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "new"))
    assert torch_at.include == tmp_path / "new" / "include"


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="gcc is not installed"):
        environment.build(installation(tmp_path))


def test_a_gpu_without_kernels_is_refused(tmp_path: Path) -> None:
    torch_at = installation(tmp_path)
    (torch_at.torch / "lib" / "libtorch_python.so").write_bytes(b"\0sm_75 sm_80 sm_90\0")
    assert environment.kernel_architectures(torch_at) == [75, 80, 90]
    assert environment._architecture(find_gpu("a10"), torch_at) == 80
    with pytest.raises(UsageError, match="no kernels for b200"):
        environment._architecture(find_gpu("b200"), torch_at)


def test_stubs_write_what_their_callers_read() -> None:
    sizes, creates = map(function, ("cusolverDnSgetrf_bufferSize", "cublasCreate_v2"))
    assert 'stand_in_note("cusolverDnSgetrf_bufferSize"); if (a5) *(int *)a5 = 0' in sizes
    assert ("malloc" in creates) > ("stand_in_note" in creates)


def test_without_cudnn_there_is_the_version_that_torch_requires(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHMEM_CUDNN", "off")
    assert environment._cudnn(installation(tmp_path), tmp_path, {}) == {"CUDNN": "92000"}
