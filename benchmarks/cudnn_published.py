"""Published peaks of a convolutional autoencoder on a GPU, beside traces with cuDNN's workspaces.

    python -m benchmarks.cudnn_published

InvokeAI pull request 9305: Qwen-Image's autoencoder in float16 on an RTX 4090 (torch 2.7.1, whose
cuDNN is 9.7.1). The model is that of diffusers, which is needed, and ``pytest-torchmem[cudnn]``.
"""

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from tabulate import tabulate
from torch import Tensor, nn

from pytest_torchmem import trace

GIB = 2**30
#: Height and width, with the published peaks of allocated bytes, in GiB.
DECODE = {
    (512, 512): 1.274,
    (768, 768): 2.563,
    (832, 1248): 4.331,
    (1024, 1024): 4.369,
    (1088, 1920): 8.468,
    (1280, 1280): 6.693,
    (1536, 1024): 6.434,
    (1536, 1536): 9.532,
    (1792, 1792): 12.884,
    (2048, 2048): 16.754,
}
ENCODE = {
    (512, 512): 0.900,
    (768, 768): 1.724,
    (832, 1248): 2.854,
    (1024, 1024): 2.879,
    (1088, 1920): 5.498,
    (1280, 1280): 4.364,
    (1536, 1024): 4.199,
    (1536, 1536): 6.179,
}


class Half(nn.Module):
    """One of the autoencoder's directions."""

    def __init__(self, model: Any, direction: str) -> None:
        super().__init__()
        self.model = model
        self.direction = direction

    def forward(self, x: Tensor) -> Tensor:
        """Decode latents, or encode an image."""
        with torch.inference_mode():
            if self.direction == "decode":
                decoded: Tensor = self.model.decode(x, return_dict=False)[0]
                return decoded
            encoded: Tensor = self.model.encode(x).latent_dist.mode()
            return encoded


def traced(half: Half, size: tuple[int, int], cudnn: str) -> float:
    """Return the peak of a trace in GiB."""
    height, width = size
    shape = (1, 3, 1, height, width)
    if half.direction == "decode":
        shape = (1, 16, 1, height // 8, width // 8)
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    options: dict[str, Any] = {
        "gpu": "rtx-4090",
        "memory": "unlimited",
        "backward": False,
        "cudnn": cudnn,
    }
    return trace(half, x, device="cuda", **options).peak / GIB


def main() -> None:
    """Print a row for each published figure."""
    with torch.device("meta"):
        model = AutoencoderKLQwenImage().half().eval()
    rows = []
    for direction, published in (("decode", DECODE), ("encode", ENCODE)):
        half = Half(model, direction).eval()
        for size, peak in published.items():
            found, without = (traced(half, size, cudnn) for cudnn in ("auto", "stored"))
            error = f"{100 * (found / peak - 1):+.2f} %"
            name = f"{direction} {size[0]} x {size[1]}"
            rows.append((name, peak, f"{found:.3f}", error, f"{without:.3f}"))
    headers = ("", "published, GiB", "traced", "error", "without cuDNN's workspace")
    print(tabulate(rows, headers=headers, tablefmt="github"))


if __name__ == "__main__":
    main()
