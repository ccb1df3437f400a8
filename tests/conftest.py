"""What all tests share."""

import gc
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

# Before torch is loaded: threads of OpenMP that wait for one another would take the processors of
# the other workers, which is most of what small kernels cost then.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Inductor compiles a program for each kind of vector instructions, to see whether it can
# (torch/_inductor/cpu_vec_isa.py, ``VecISA.check_build``), which takes longer than a test's own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

from pytest_torchmem.torch_private.dispatcher import turns

# The same figures on every machine: its GPU is for tests that are asked for by name.
_CHOSEN = {"STAND_IN_NAME", "PYTEST_XDIST_WORKER"} & os.environ.keys()
if not _CHOSEN and not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

pytest_plugins = ["pytester"]

#: Other programs are drawn in every run. A failure prints what draws its own again: hypothesis a
#: blob, for ``@reproduce_failure``, and ``chance`` a seed, for the environment variable.
SEED = os.environ.setdefault("TORCHMEM_SEED", str(secrets.randbits(32)))

#: Figures must not depend on which cuDNN is installed. Where ``tests/cudnn`` finds one.
CUDNN = os.environ.setdefault("TORCHMEM_TESTED_CUDNN", os.environ.get("TORCHMEM_CUDNN", ""))
os.environ["TORCHMEM_CUDNN"] = "off"

# Explicitly, since hypothesis draws the same in every run where it finds itself in CI.
settings.register_profile("torchmem", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("torchmem")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Both devices that a trace models, one after the other."""
    return str(request.param)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command: what it printed, or its error where it ends with one."""
    from pytest_torchmem.cli import main

    def run(*words: str, status: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == status
        told = capsys.readouterr()
        return told.out if status < 2 else told.err

    return run


@pytest.fixture
def chance() -> random.Random:
    """Random numbers that are others in every run of the tests."""
    print(f"TORCHMEM_SEED={SEED}")
    return random.Random(SEED)


@pytest.fixture(autouse=True, scope="module")
def _collections_leave_out_what_is_imported() -> None:
    """Leave what is alive before a module's tests out of every later collection of garbage.

    A measurement collects several times, and the objects of torch's modules and of torch's samples
    of its operators are a third of a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _handlers_of_signals_are_put_back() -> Iterator[None]:
    """Fail the test that leaves one of its own, where the next one would fail for it.

    The same for the turn of a trace's threads: another thread would wait for it for ever.
    """
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not turns()._is_owned()
