"""``torch.cuda`` and ``torch.accelerator`` answer for the GPU, as do its random generators."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from pytest_torchmem.targets.gpus import find_gpu
from tests.results import in_a_trace, on_fake_cuda, result_of


@in_a_trace("cuda", gpu="h100")
def test_the_device_that_is_there() -> None:
    properties, gpu = torch.cuda.get_device_properties(0), find_gpu("h100")
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == properties.name == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability("cuda:0") == (9, 0)
    assert torch.cuda.is_bf16_supported()
    assert properties.total_memory == gpu.memory
    assert (properties.major, properties.minor) == (9, 0)
    assert properties.multi_processor_count == 132
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.backends.cudnn.is_available()
    assert torch.get_device_module("cuda") is torch.cuda


@in_a_trace("cuda", gpu="t4")
def test_bfloat16_is_emulated() -> None:
    assert not torch.cuda.is_bf16_supported(including_emulation=False)


@in_a_trace("cuda")
def test_allocated_bytes_are_blocks_of_512() -> None:
    a = torch.ones(1000, device="cuda")  # 4000 bytes: a block of 4096
    first = torch.cuda.memory_allocated()
    b = torch.ones(1, device="cuda")
    del b
    figures = [first, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    torch.cuda.reset_peak_memory_stats()
    figures.append(torch.cuda.max_memory_allocated())
    stats = torch.cuda.memory_stats()
    figures += [stats["requested_bytes.all.current"], stats["allocated_bytes.all.peak"]]
    figures += [torch.accelerator.memory_allocated(), stats["allocation.all.allocated"]]
    assert figures == [4096, 4096, 4608, 4096, 4000, 4096, 4096, 2]
    assert a is not None


@in_a_trace("cuda", gpu="t4")
def test_reserved_and_free_memory() -> None:
    gpu, empty = find_gpu("t4"), torch.cuda.mem_get_info()
    x = torch.ones(5 * 1024**2, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del x
    assert torch.cuda.memory_reserved() == reserved == 20 * 1024**2
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert empty == (gpu.memory - gpu.context, gpu.memory)
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.max_memory_reserved() == reserved
    assert torch.accelerator.max_memory_reserved() == reserved
    assert (free, total) == empty == torch.accelerator.get_memory_info()
    assert "Allocated memory" in torch.cuda.memory_summary()


@in_a_trace("cuda", gpu="h100")
def test_what_the_driver_and_the_libraries_are_asked() -> None:
    x = torch.ones(300_000, device="cuda")
    torch.cuda.reset_peak_host_memory_stats()
    free, total = torch.cuda.mem_get_info()
    assert torch.cuda.device_memory_used() == total - free > x.nbytes
    assert torch.cuda.host_memory_stats_as_nested_dict() == {}
    assert torch.cuda.temperature() == torch.cuda.memory_usage() == 0
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.backends.cuda.cublas_workspace_size() == 32 * 1024**2
    assert torch.backends.cuda.cublaslt_workspace_size() == 32 * 1024**2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: torch.cuda.caching_allocator_alloc(512), "raw GPU pointers"),
        (lambda: torch.backends.cuda.cublas_workspace_size(0), "CUBLAS_WORKSPACE_CONFIG"),
    ],
    ids=["pointer", "size"],
)
def test_what_a_trace_cannot_do_is_refused(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        on_fake_cuda(call)


cuda = torch.cuda


def drawn(generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(100, device="cuda", generator=generator)


def twice_after(set_back: Callable[[], object], draw: Callable[[], Tensor] = drawn) -> bool:
    set_back()
    first = draw()
    torch.rand(7)  # on the host
    set_back()
    return torch.equal(first, draw())


def states() -> dict[str, bool]:
    seeded = torch.Generator("cuda").manual_seed(1)
    drawn(seeded)
    state, offset = seeded.get_state(), seeded.get_offset()
    one, all_ = cuda.get_rng_state(), cuda.get_rng_state_all()

    def from_fork() -> Tensor:
        with torch.random.fork_rng(devices=[0]):
            return drawn()

    def by_default_generator() -> Tensor:
        return drawn(cuda.default_generators[0])

    def dropped() -> Tensor:
        return F.dropout(torch.ones(100, device="cuda"))

    def of_attention() -> Tensor:
        query = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.float16)
        return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)

    def of_layers() -> Tensor:
        torch.manual_seed(5)
        layers = nn.LSTM(4, 4, 2, dropout=0.5, device="cuda")
        return layers(torch.ones(3, 2, 4, device="cuda"))[0].detach()

    draws = {
        "rand": drawn,
        "default generator": by_default_generator,
        "dropout": dropped,
        "attention": of_attention,
        "lstm": of_layers,
        "like": lambda: torch.randn_like(torch.ones(50, device="cuda")),
        "randperm": lambda: torch.randperm(50, device="cuda"),
        "samples": lambda: torch.multinomial(torch.ones(50, device="cuda"), 9),
    }
    found = {name: twice_after(lambda: cuda.manual_seed(3), draw) for name, draw in draws.items()}
    found["all"] = twice_after(lambda: cuda.manual_seed_all(3))
    found["state"] = twice_after(lambda: cuda.set_rng_state(one))
    found["states"] = twice_after(lambda: cuda.set_rng_state_all(all_))
    found["fork"] = twice_after(lambda: None, from_fork)
    found["set_state"] = twice_after(lambda: seeded.set_state(state), lambda: drawn(seeded))
    found["set_offset"] = twice_after(lambda: seeded.set_offset(offset), lambda: drawn(seeded))
    found["some offset"] = seeded.set_offset(40).get_offset() == 40
    clone = seeded.clone_state()
    found["clone"] = torch.equal(drawn(seeded), drawn(clone))
    again = pickle.loads(pickle.dumps(seeded))
    found["pickled"] = again.device == seeded.device and torch.equal(drawn(seeded), drawn(again))
    cuda.seed()
    found["moves"] = not torch.equal(drawn(), drawn())
    before = torch.get_rng_state()
    drawn()
    found["host stays"] = torch.equal(before, torch.get_rng_state())
    at, _ = cuda.get_rng_state(), drawn()
    found["another state"] = not torch.equal(at, cuda.get_rng_state())
    return found


@in_a_trace("cuda", values="real")
def test_seeds_and_states_say_what_is_drawn() -> None:
    found = states()
    assert found == dict.fromkeys(found, True)


def seeded_together(device: str) -> list[float]:
    """As ``transformers.set_seed`` and others do."""
    torch.manual_seed(2)
    if device == "cuda":
        cuda.manual_seed_all(2)
        states = cuda.get_rng_state(), torch.get_rng_state()
    else:
        states = torch.get_rng_state(), torch.get_rng_state()
    numbers = []
    for _ in range(2):
        layer = nn.Linear(8, 8).to(device)  # drawn on the host
        output = F.dropout(layer(torch.randn(4, 8, device=device)), 0.5)
        numbers += [output.sum().item(), torch.rand(1, device=device).item()]
    (cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(states[0])
    torch.set_rng_state(states[1])
    return [*numbers, torch.rand(1).item(), torch.rand(1, device=device).item()]


def test_a_program_that_seeds_all_alike_draws_as_on_the_cpu() -> None:
    found = result_of(lambda: seeded_together("cuda"), device="cuda", values="real")
    assert found == pytest.approx(seeded_together("cpu"), abs=1e-5)


def test_a_gpus_own_numbers_after_draws_that_are_not_computed(monkeypatch):
    monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(0, 0))
    told: list[Any] = []

    def program(device: str, seed: Callable[[int], object]) -> None:
        x = torch.zeros(2048, 65, device=device)
        for _ in range(2):
            seed(3)
            F.dropout(x * 2)
            told.append(torch.randint(0, 1 << 20, (3,), device=device).tolist())

    program("cpu", torch.manual_seed)
    trace(program, "cuda", cuda.manual_seed, device="cuda")
    assert told == told[:1] * len(told)


_BEFORE = torch.autocast("cuda", torch.bfloat16)


@torch.autocast("cuda", torch.bfloat16)
def _cast(x: Tensor) -> Tensor:
    return x @ x


@torch.cuda.amp.autocast()
def _cast_to_half(x: Tensor) -> Tensor:
    return x @ x


@torch.autocast("cuda", torch.bfloat16, enabled=False)
def _not_cast(x: Tensor) -> Tensor:
    return x @ x


def _within_another(x: Tensor) -> Tensor:
    with _BEFORE:
        return x @ x


@pytest.mark.filterwarnings("ignore:torchmem. this torch.autocast")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns nothing off")
@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        *((_cast, torch.bfloat16), (_cast_to_half, torch.float16)),
        *((_not_cast, torch.float32), (_within_another, torch.float32)),
    ],
)
def test_an_autocast_made_where_torch_saw_no_gpu(program, dtype):
    assert result_of(lambda: program(torch.ones(8, 8, device="cuda")).dtype, device="cuda") is dtype
    assert program(torch.ones(8, 8)).dtype is torch.float32
    assert not _BEFORE._enabled


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch turns nothing off")
def test_an_autocast_that_is_off_says_so():
    with pytest.warns(UserWarning, match="made before the trace"):
        trace(lambda: _within_another(torch.ones(8, 8, device="cuda")), device="cuda")
