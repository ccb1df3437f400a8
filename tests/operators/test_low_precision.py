"""Products of packed numbers, which only a GPU has kernels for."""

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace


def packed_by_lane(weight: Tensor, tile: int, several: int, lane: int, inner: int) -> int:
    """Return the first number of a lane, as native/cuda/int4mm.cu has it in
    ``matrix_to_m16n8k16_Bint4_layout``.
    """
    first = several * inner * 8
    places = [first + lane % 4, first + lane % 4 + 4, first + 8 + lane % 4, first + 12 + lane % 4]
    row = tile * 8 + lane // 4
    halves = [int(weight[row, place]) for place in places] if row < len(weight) else [0] * 4
    bits = sum((byte & 15) << (16 + 4 * place) for place, byte in enumerate(halves))
    bits += sum((byte >> 4) << (4 * place) for place, byte in enumerate(halves))
    return bits - (1 << 32) if bits >= 1 << 31 else bits


@pytest.mark.parametrize(
    ("inner", "rows", "width", "group"), [(2, 24, 64, 32), (4, 16, 128, 64), (8, 8, 256, 128)]
)
def test_numbers_of_four_bits(inner: int, rows: int, width: int, group: int) -> None:
    def program() -> None:
        numbers = torch.randint(0, 16, (rows, width), device="cuda")
        weight = ((numbers[:, ::2] << 4) | numbers[:, 1::2]).to(torch.uint8)
        packed = torch._convert_weight_to_int4pack(weight, inner)
        tile, lane = rows // 8 - 1, 13
        assert packed[tile, -1, lane, 0] == packed_by_lane(
            weight, tile, packed.shape[1] - 1, lane, inner
        )
        scales = torch.randn(width // group, rows, 2, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(5, width, dtype=torch.bfloat16, device="cuda")
        scale, zero = scales.float().repeat_interleave(group, 0).unbind(-1)
        expected = x @ ((numbers - 8) * scale.t() + zero.t()).bfloat16().t()
        before = torch.cuda.memory_allocated()
        y = torch._weight_int4pack_mm(x, packed, group, scales)
        assert torch.cuda.memory_allocated() - before == max(y.nbytes, 512)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)
        with pytest.raises(RuntimeError, match="kBFloat16"):
            torch._weight_int4pack_mm(x.float(), packed, group, scales)

    trace(program, device="cuda")
