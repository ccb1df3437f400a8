"""Unmodified training code runs on fake cuda: placing, moving, asking where something is."""

import copy
import math
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.torch_private.function_holders import is_of_program
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.patches import Patch
from tests.results import in_a_trace, on_fake_cuda, result_of


@in_a_trace("cuda")
def test_every_way_of_placing_a_tensor() -> None:
    """Beside those that ``test_several_gpus`` calls by every name of a device."""
    x = torch.ones(4, 4)
    made = {
        "cuda": x.cuda(),
        "cuda non_blocking": x.cuda(non_blocking=True),
        "to with dtype": x.to("cuda", torch.float16),
        "to by name": x.to(device="cuda", dtype=torch.bfloat16, non_blocking=True),
        "to other": x.to(torch.zeros(1, device="cuda")),
        "to copy": x.to("cuda", copy=True),
        "channels last": torch.ones(1, 2, 3, 4).to("cuda", memory_format=torch.channels_last),
        "type": x.type("torch.cuda.HalfTensor"),
        "as_tensor of tensor": torch.as_tensor(x, device="cuda"),
        "linspace": torch.linspace(0, 1, 4, device="cuda"),
        "eye": torch.eye(3, device="cuda"),
        "randn_like": torch.randn_like(x, device="cuda"),
        "empty_like of input": torch.empty_like(input=x, device="cuda", dtype=torch.half),
        "normal beside a tensor": torch.normal(torch.zeros(2, device="cuda"), 1.0),
        "zeros_like": torch.zeros_like(x.cuda()),
        "new_ones": x.cuda().new_ones(3),
        "new_tensor": x.cuda().new_tensor([1, 2]),
        "new_full": x.cuda().new_full((2,), 1.0),
        "scalar_tensor": torch.scalar_tensor(1.0, device="cuda"),
        "tril_indices": torch.tril_indices(3, 3, device="cuda"),
        "hann_window": torch.hann_window(8, device="cuda"),
        "generator": torch.randn(3, device="cuda", generator=torch.Generator("cuda")),
        "operator": x.cuda() + 1,
        "parameter": nn.Parameter(x.cuda()),
        "buffer": nn.Buffer(x.cuda()),
        "pinned": x.pin_memory().cuda(non_blocking=True),
        "view": x.cuda().view(-1).t(),
        "detach": x.cuda().detach(),
        "data": x.cuda().data,
    }
    for name, tensor in made.items():
        assert tensor.is_cuda, name
        assert tensor.device == torch.device("cuda", 0), name
        assert tensor.get_device() == 0, name
        assert not tensor.is_cpu, name
        assert tensor.untyped_storage().device.type == "cuda", name


@in_a_trace("cuda")
def test_every_way_back_to_the_host() -> None:
    x = torch.arange(4, device="cuda")
    made = [x.cpu(), x.to("cpu"), x.to(torch.zeros(1)), torch.as_tensor(x, device="cpu")]
    assert all(tensor.is_cpu and tensor.tolist() == [0, 1, 2, 3] for tensor in made)


def test_contexts_and_the_default_device() -> None:
    def body() -> list[str]:
        with torch.device("cuda"):
            inside = torch.ones(2)
            asked = torch.ones(2, device="cpu")
            module = nn.Linear(2, 2)
        torch.set_default_device("cuda")
        default = torch.ones(2)
        return [t.device.type for t in (inside, asked, module.weight, default)]

    assert on_fake_cuda(body) == ["cuda", "cpu", "cuda", "cuda"]
    assert torch.get_default_device().type == "cpu"
    assert torch.ones(1).device.type == "cpu"


@in_a_trace("cuda")
def test_modules_move_with_parameters_gradients_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [id(parameter) for parameter in model.parameters()]
    model.to("cuda", torch.float64)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    model(torch.ones(3, 4, device="cuda", dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    tensors = [*model.parameters(), *model.buffers(), *twin.parameters(), *twin.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    assert before == [id(parameter) for parameter in model.parameters()]
    assert all(tensor.is_cuda for tensor in tensors)
    assert all(gradient is not None and gradient.is_cuda for gradient in gradients)
    assert all(tensor.is_cpu for tensor in state.values())


@in_a_trace("cuda")
def test_gradients_cross_devices() -> None:
    leaf = torch.ones(4, requires_grad=True)
    (leaf.cuda() * 2).cpu().sum().backward()
    on_gpu = torch.ones(4, device="cuda", requires_grad=True)
    on_gpu.to("cpu", torch.float64).sum().backward()
    copied = torch.ones(4, requires_grad=True)
    torch.zeros(4, device="cuda").copy_(copied).sum().backward()
    assert copied.grad.is_cpu
    assert leaf.grad.is_cpu
    assert on_gpu.grad.is_cuda
    assert on_gpu.grad.dtype == torch.float32


def test_operators_on_two_devices_raise_as_torch_does():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        trace(lambda: torch.ones(2, 2, device="cuda") @ torch.ones(2, 2), device="cuda")

    def loss() -> None:
        nn.functional.cross_entropy(torch.ones(2, 3, device="cuda"), torch.tensor([0, 1]))

    with pytest.raises(RuntimeError, match="same device"):
        trace(loss, device="cuda")


def test_host_memory_only_functions_raise_as_torch_does():
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        trace(lambda: torch.ones(2, device="cuda").numpy(), device="cuda")


@in_a_trace("cuda")
def test_addresses_differ_where_memory_does() -> None:
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    empty = torch.tensor([], device="cuda")
    assert (empty.data_ptr(), empty.untyped_storage().data_ptr()) == (0, 0)
    assert x.data_ptr() != y.data_ptr()
    assert x.data_ptr() == x.view(2, 2).data_ptr()
    assert x[1:].data_ptr() == x.data_ptr() + 4
    assert x.data_ptr() % 64 == 0


@in_a_trace("cuda")
def test_data_loaders_feed_the_gpu() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)
    found = []
    for x, y in loader:
        found += [x.is_pinned(), x.cuda(non_blocking=True).is_cuda, y.cuda().is_cuda]
    assert found == [True] * 6


@in_a_trace("cuda")
def test_packed_sequences_and_state_of_recurrent_layers() -> None:
    layer = nn.LSTM(4, 8, num_layers=2, bidirectional=True).cuda()
    x, lengths = torch.ones(5, 3, 4, device="cuda"), torch.tensor([5, 4, 2])
    output, (hidden, cell) = layer(nn.utils.rnn.pack_padded_sequence(x, lengths))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(output)
    padded.sum().backward()
    assert all(one.is_cuda for one in (padded, hidden, cell))
    assert lengths.is_cpu


def test_models_on_meta_get_memory_on_a_device(device: str) -> None:
    def program() -> None:
        with torch.device("meta"):
            model = nn.Linear(1024, 1024, bias=False)
        held.append(model.to_empty(device=device))
        assert model.weight.device.type == device
        assert model.weight.new(3).device.type == device

    held: list[nn.Module] = []
    assert trace(program, device=device).peak == 4 * 1024**2 + 12


@pytest.mark.parametrize(
    "program",
    [
        lambda there, here, index: here[index],
        lambda there, here, index: here[index > 0],
        lambda there, here, index: here.index_put_((index,), torch.ones(2)),
        lambda there, here, index: here.__setitem__(index, 1.0),
    ],
)
def test_an_index_on_the_gpu_does_not_go_with_a_tensor_on_the_host(program: Any) -> None:
    def body() -> None:
        program(torch.ones(4, device="cuda"), torch.ones(4), torch.tensor([0, 1], device="cuda"))

    # From torch 2.15 on one number is written by ``index_fill_``.
    message = r"either on cpu or on the same device .* \(cpu\)|two devices, cpu and cuda:0"
    with pytest.raises(RuntimeError, match=message):
        trace(body, device="cuda")


@in_a_trace("cuda")
def test_an_index_on_the_host_goes_with_a_tensor_on_the_gpu() -> None:
    there, index = torch.ones(4, device="cuda"), torch.tensor([0, 1])
    assert there[index].is_cuda
    there[index] = torch.tensor(2.0)
    there[index] = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        there[index] = torch.ones(2)


def test_lengths_of_sequences_are_on_the_host() -> None:
    lengths = torch.tensor([5, 3])
    pack, x = nn.utils.rnn.pack_padded_sequence, torch.ones(5, 2, 4)
    with pytest.raises(RuntimeError, match="1D CPU int64 tensor, but got 1D cuda:0 Long tensor"):
        trace(lambda: pack(x.cuda(), lengths.cuda()), device="cuda")


def test_lengths_that_a_module_is_given_are_as_on_the_host() -> None:
    class Packed(nn.Module):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return nn.utils.rnn.pack_padded_sequence(x, lengths).data * 2

    x = torch.ones(5, 2, 4, requires_grad=True)
    assert trace(Packed(), x, torch.tensor([5, 3]), device="cuda").peak > 0


@pytest.mark.skipif(TORCH_VERSION >= (2, 15), reason="reads values that a trace does not know")
def test_numbers_that_composites_make_first_of_all_are_on_the_gpu() -> None:
    class Quantile(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.quantile(0.5, dim=-1)

    assert trace(Quantile(), torch.randn(4, 8, requires_grad=True), device="cuda").peak > 0


@pytest.mark.parametrize("last", ["cuda", "cpu"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_numbers_that_composites_make_are_beside_their_tensor(last: str, device: str) -> None:
    """Whichever device the last operator before them was on."""
    found: dict[str, str] = {}
    fake_quantize = torch.fake_quantize_per_tensor_affine

    def program() -> None:
        x, other = torch.ones(3, 4, 5, device=device), torch.ones(2, device="cuda").to(last)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        for name, composite in {
            "quantile": lambda: x.quantile(0.5),
            "combinations": lambda: torch.combinations(x[0, 0], with_replacement=True),
            "nanquantile": lambda: x.nanquantile(0.5, dim=1),
            "matrix_rank": lambda: torch.linalg.matrix_rank(x),
            "matrix_rank of nothing": lambda: torch.linalg.matrix_rank(x[:, :0]),
            "pinv": lambda: torch.linalg.pinv(x, atol=0.1),
            "max_pool1d": lambda: nn.functional.max_pool1d(x, 2),
            "fake_quantize": lambda: fake_quantize(x, x[0, 0, :1], zero, 0, 9),
        }.items():
            other * 1
            found[name] = composite().device.type
        other * 1
        found["normal"] = torch.normal(0.0, 1.0, (3,), device=device).device.type
        other * 1
        assert torch.normal(0.0, 1.0, (3,)).device.type == "cpu"

    trace(program, device="cuda")
    assert set(found.values()) == {device}, found
    with torch.inference_mode():
        trace(program, device="cuda")
    assert set(found.values()) == {device}, found


@in_a_trace("cuda")
def test_torch_tensor_of_sizes_is_on_the_host_after_whatever_ran() -> None:
    on_gpu = torch.randn(8, 8, device="cuda")
    for made in (torch.Tensor(8, 8), torch.Tensor(torch.Size([8, 8])), torch.Tensor()):
        assert made.device.type == "cpu"
        _ = on_gpu * 2
    weights = torch.Tensor(8, 8).fill_(0.5).to(on_gpu.device)
    weights.view(-1)[::8] = 0.25  # C++ makes a number on the host of it
    assert weights.is_cuda
    on_gpu += weights.log()


def test_a_subclass_of_tensors_is_made_of_sizes_and_of_data(device: str) -> None:
    kind = type(torch.Tensor)

    def program() -> list[type]:
        class Plain(torch.Tensor):
            pass

        class Named(torch.Tensor):
            def __new__(cls, data: object, name: str) -> "Named":
                return super().__new__(cls, data)  # type: ignore[call-arg,return-value]

            def __init__(self, data: object, name: str) -> None:
                self.label = name

        for made in (Plain(2, 3), Plain([0.5, 2.0]), Plain(torch.zeros(2)), Named([1.5], "a")):
            assert type(made) in (Plain, Named)
            assert type(made * 2) is type(made)
            assert made.to(device).device.type == device
        assert Plain([0.5]).item() == 0.5
        assert Named([1.5], "a").label == "a"
        kinds.extend((Plain, Named))
        return kinds

    kinds: list[type] = []
    for _ in range(2):  # the second time they are there from the beginning
        trace(program, device=device)
    assert type(torch.Tensor) is kind
    assert {*map(type, kinds)} == {kind}
    assert "__new__" not in vars(torch.Tensor)
    assert kinds[0](2, 3).shape == (2, 3)


def test_the_default_tensor_type_is_that_of_torch_tensor() -> None:
    kind = type(torch.Tensor)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.Tensor(3, 4))
            nn.init.ones_(self.weight)

    def program() -> None:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        made = [torch.Tensor([10.0]), torch.Tensor(2, 3), torch.Tensor(), torch.ones(1)]
        assert {one.device.type for one in made} == {"cuda"}
        assert made[0].log().item() == pytest.approx(math.log(10))
        layer = Layer()
        assert type(layer.weight) is nn.Parameter
        assert isinstance(copy.deepcopy(layer).weight, torch.Tensor)
        assert layer.weight.is_cuda
        torch.set_default_tensor_type(torch.DoubleTensor)
        assert torch.Tensor([1.0]).type() == "torch.DoubleTensor"
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        assert torch.Tensor([1.0]).type() == "torch.cuda.HalfTensor"

    trace(program, device="cuda")
    assert type(torch.Tensor) is kind
    assert torch.Tensor([1.0]).type() == "torch.FloatTensor"


SOMETHING = object()


def replaced_functions() -> list[tuple[Any, str, Any]]:
    """Return owners, names and originals of all that a trace on fake cuda replaces."""
    found: list[tuple[Any, str, Any]] = []

    def step() -> None:
        torch.zeros(1, device="cuda")
        found.extend(one for patch in Patch.standing.values() for one in patch.stood_before())

    trace(step, device="cuda")
    return found


def test_torch_has_put_nothing_of_a_program_there() -> None:
    replaced = replaced_functions()
    assert len(replaced) > 400
    assert [name for owner, name, found in replaced if is_of_program(owner, name, found)] == []


def make_class(return_value: object) -> type:
    return type("Own", (), {"__new__": lambda *_, **__: return_value})


def make_function(return_value: object) -> Any:
    return lambda *_, **__: return_value


MOCKED = """
cuda.is_available cuda.device_count cuda.get_device_properties cuda.max_memory_allocated
cuda.memory.empty_cache cuda.Stream cuda.Event Generator accelerator.device_count manual_seed
get_rng_state randn zeros_like fft.fftfreq load save jit.load Tensor.cuda Tensor.item nn.Module.to
"""


@pytest.mark.parametrize("make", [Mock, make_function, make_class])
@pytest.mark.parametrize("name", MOCKED.split())
def test_a_mock_is_what_the_program_calls(make, name, monkeypatch):
    path, _, attribute = f"torch.{name}".rpartition(".")
    owner = torch
    for part in path.split(".")[1:]:
        owner = getattr(owner, part)
    mock = make(return_value=SOMETHING)
    monkeypatch.setattr(owner, attribute, mock)
    assert result_of(lambda: getattr(owner, attribute)(None), device="cuda") == SOMETHING
    assert vars(owner)[attribute] is mock
    monkeypatch.undo()
    before = vars(owner).get(attribute)
    trace(lambda: torch.randn(1, device="cuda"), device="cuda")
    assert vars(owner).get(attribute) is before


def spy(calls: list[str], original: Any) -> Any:
    """Return what notes a call and makes it."""

    def spied(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return spied


def test_a_spy_is_called_and_calls_what_a_trace_has_there() -> None:
    calls: list[str] = []
    wrapped = patch.object(torch.cuda, "get_device_name", wraps=torch.cuda.get_device_name)
    spied = patch.object(torch.cuda, "synchronize", side_effect=spy(calls, torch.cuda.synchronize))
    to_cuda = patch.object(torch.Tensor, "cuda", spy(calls, torch.Tensor.cuda))
    effect = spy(calls, torch.cuda.empty_cache)
    alike = patch.object(torch.cuda, "empty_cache", side_effect=effect, autospec=True)

    def step() -> None:
        nn.Linear(2, 2).cuda()(torch.zeros(1, 2).cuda()).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.get_device_name(0) == "NVIDIA A100-SXM4-80GB"

    plain = trace(step, device="cuda").figures()
    with wrapped as name, spied, to_cuda, alike as emptied:
        assert trace(step, device="cuda").figures() == plain
        assert calls[-2:] == ["synchronize", "empty_cache"]
        assert calls.count("cuda") == 3  # two parameters and the input
        name.assert_called_once_with(0)
        emptied.assert_called_once_with()
    assert torch.cuda.synchronize.__globals__["__name__"] == "torch.cuda"


def test_what_a_program_replaces_in_a_trace_stays_as_it_does_outside() -> None:
    before, ours = torch.cuda.device_count, Mock(return_value=4)

    def step() -> None:
        torch.zeros(1, device="cuda")
        torch.cuda.device_count = ours

    try:
        trace(step, device="cuda")
        assert torch.cuda.device_count is ours
    finally:
        torch.cuda.device_count = before


def test_what_is_put_back_too_late_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock made in a trace and undone after it would put the trace's function there for good."""
    before = torch.cuda.device_count

    def step() -> None:
        torch.zeros(1, device="cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    trace(step, device="cuda")
    monkeypatch.undo()
    trace(lambda: torch.zeros(1, device="cuda"), device="cuda")
    assert torch.cuda.device_count is before
