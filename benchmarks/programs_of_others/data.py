"""Small synthetic data sets, written where programs look for the real ones.

A name is ``kind`` or ``kind:folder``; the folder is relative to the program's.
"""

import gzip
import json
import pickle
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

_WRITERS: dict[str, Callable[[Path], None]] = {}
WORDS = "the a cat dog house tree runs sees eats small big red and or with under".split()  # noqa: SIM905


def write(name: str) -> None:
    """Write the data set, or put the stand-in in its place."""
    kind, _, folder = name.partition(":")
    _WRITERS[kind](Path(folder or "."))


def writer(function: Callable[[Path], None]) -> Callable[[Path], None]:
    """Register a data set by the function's name."""
    _WRITERS[function.__name__] = function
    return function


def _random() -> numpy.random.Generator:
    return numpy.random.default_rng(0)


@writer
def mnist(folder: Path) -> None:
    """Write 300 digits to train on and 128 to test, in MNIST's files."""
    _idx(folder / "MNIST" / "raw", "train", 300)
    _idx(folder / "MNIST" / "raw", "t10k", 128)


@writer
def fashion(folder: Path) -> None:
    """Write the same for FashionMNIST."""
    _idx(folder / "FashionMNIST" / "raw", "train", 300)
    _idx(folder / "FashionMNIST" / "raw", "t10k", 128)


def _idx(folder: Path, part: str, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = _random().integers(0, 256, (count, 28, 28), dtype=numpy.uint8)
    labels = (numpy.arange(count) % 10).astype(numpy.uint8)
    image_bytes = struct.pack(">IIII", 0x803, count, 28, 28) + images.tobytes()
    label_bytes = struct.pack(">II", 0x801, count) + labels.tobytes()
    for stem, content in (("images-idx3", image_bytes), ("labels-idx1", label_bytes)):
        path = folder / f"{part}-{stem}-ubyte"
        path.write_bytes(content)
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))


@writer
def cifar(folder: Path) -> None:
    """Write 128 images to train on and 64 to test; their checksums are not asked for."""
    import torchvision

    for name in ("CIFAR10", "CIFAR100"):
        data_set = getattr(torchvision.datasets, name)
        data_set._check_integrity = lambda self: True
        torchvision.datasets.cifar.check_integrity = lambda *arguments: True
        root = folder / data_set.base_folder
        root.mkdir(parents=True, exist_ok=True)
        classes = 10 if name == "CIFAR10" else 100
        for part, _ in data_set.train_list + data_set.test_list:
            count = 64 if part.startswith("test") else 128 if classes == 100 else 26
            images = _random().integers(0, 256, (count, 3072), dtype=numpy.uint8)
            labels = [index % classes for index in range(count)]
            content = {"data": images, "labels": labels, "fine_labels": labels}
            (root / part).write_bytes(pickle.dumps(content))
        names = [f"class {index}" for index in range(classes)]
        meta = {data_set.meta["key"]: names}
        (root / data_set.meta["filename"]).write_bytes(pickle.dumps(meta))


@writer
def images(folder: Path) -> None:
    """Write 24 small pictures in two classes."""
    _images(folder, "classes")


@writer
def train_and_val_images(folder: Path) -> None:
    """Write pictures in two classes below ``train`` and ``val``."""
    _images(folder / "train", "classes")
    _images(folder / "val", "classes")


@writer
def flat_images(folder: Path) -> None:
    """Write 24 small pictures into one folder."""
    _images(folder, "flat")


def _images(folder: Path, form: str) -> None:
    from PIL import Image

    random = _random()
    for index in range(24):
        place = folder / f"class{index % 2}" if form == "classes" else folder
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(place / f"{index:03d}.jpg")


@writer
def wikitext(folder: Path) -> None:
    """Write three small texts as those of word language models."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 400), ("valid", 100), ("test", 100)):
        (folder / f"{part}.txt").write_text(text(count), encoding="utf-8")


@writer
def tiny_text(folder: Path) -> None:
    """Write one text of 20,000 characters named ``input.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    content = "O God, O God!\n" + text(500)
    (folder / "input.txt").write_text(content, encoding="utf-8")


def text(lines: int) -> str:
    """Return lines of words that are drawn from a small vocabulary."""
    draw = random.Random(0)
    return "\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(lines)) + "\n"


@writer
def names(folder: Path) -> None:
    """Write one name a line to ``names.txt``."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["".join(draw.choices("abcdefghij", k=draw.randint(3, 8))) for _ in range(1200)]
    (folder / "names.txt").write_text("\n".join(rows), encoding="utf-8")


@writer
def cora(folder: Path) -> None:
    """Write a citation graph of 120 papers in Cora's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    subjects = ["Case_Based", "Genetic_Algorithms", "Neural_Networks", "Theory"]
    subjects += ["Probabilistic_Methods", "Reinforcement_Learning", "Rule_Learning"]
    content, cites = [], []
    for paper in range(2708):
        bits = "\t".join(str(int(draw.random() < 0.1)) for _ in range(64))
        content.append(f"{paper}\t{bits}\t{subjects[paper % 7]}")
        cites.append(f"{paper}\t{(paper * 7 + 1) % 2708}")
    (folder / "cora.content").write_text("\n".join(content) + "\n", encoding="utf-8")
    (folder / "cora.cites").write_text("\n".join(cites) + "\n", encoding="utf-8")


@writer
def gym(folder: Path) -> None:
    """Let ``import gym`` bring its successor gymnasium, whose worlds then begin from one seed."""
    import gymnasium
    from gymnasium.utils import seeding

    seeded = seeding.np_random
    seeding.np_random = lambda seed=None: seeded(0 if seed is None else seed)
    sys.modules["gym"] = gymnasium


@writer
def json_pairs(folder: Path) -> None:
    """Write question and answer pairs to ``pairs.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"prompt": line, "completion": line}) for line in text(64).splitlines()]
    (folder / "pairs.jsonl").write_text("\n".join(rows), encoding="utf-8")


@writer
def sine(folder: Path) -> None:
    """Write ten sine waves as the example's generator does."""
    import torch

    waves = numpy.sin(numpy.arange(60)[None, :] / 20.0 + numpy.arange(10)[:, None])
    with (folder / "traindata.pt").open("wb") as file:
        torch.save(waves, file)


@writer
def nanogpt(folder: Path) -> None:
    """Write tokens and their vocabulary as the preparation of a data set does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = _random().integers(0, 65, 4000, dtype=numpy.uint16)
    tokens.tofile(folder / "train.bin")
    tokens[:1000].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


@writer
def path(folder: Path) -> None:
    """Let the program import from the folder, as an installed package would be."""
    sys.path.insert(0, str(folder.absolute()))


@writer
def folder(folder: Path) -> None:
    """Make a folder that the program does not make."""
    folder.mkdir(parents=True, exist_ok=True)


@writer
def masks(folder: Path) -> None:
    """Write pictures, and masks of two classes, for segmentation."""
    from PIL import Image

    for part in ("imgs", "masks"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    random = _random()
    for index in range(12):
        pixels = random.integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / "imgs" / f"{index}.png")
        mask = (random.random((64, 64)) < 0.5).astype(numpy.uint8)
        Image.fromarray(mask).save(folder / "masks" / f"{index}_mask.png")


@writer
def wandb(folder: Path) -> None:
    """Let ``import wandb`` bring something that takes every call and logs nothing."""
    from unittest.mock import MagicMock

    sys.modules["wandb"] = MagicMock()


@writer
def cora_archive(folder: Path) -> None:
    """Write Cora's files, and let ``requests.get`` bring them as the archive that it is."""
    import io
    import tarfile
    from contextlib import contextmanager
    from types import SimpleNamespace

    import requests

    cora(folder / "cora")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder / "cora", "cora")

    @contextmanager
    def get(*arguments: Any, **options: Any) -> Any:
        yield SimpleNamespace(raw=io.BytesIO(packed.getvalue()))

    requests.get = get


@writer
def terminal(folder: Path) -> None:
    """Let ``stty size`` answer although there is no terminal."""
    import io
    import os

    def answer(*arguments: Any) -> Any:
        return io.StringIO("24 80")

    os.popen = answer  # type: ignore[assignment]


@writer
def planetoid(folder: Path) -> None:
    """Let PyG's ``Planetoid`` be a random graph of 300 nodes with Cora's masks."""
    import torch
    import torch_geometric.datasets
    from torch_geometric.data import Data, InMemoryDataset
    from torch_geometric.utils import to_undirected

    class Planetoid(InMemoryDataset):
        def __init__(
            self,
            root: str,
            name: str,
            split: str = "public",
            transform: Callable[..., Any] | None = None,
        ) -> None:
            super().__init__(None, transform)
            draw = torch.Generator().manual_seed(0)
            count = 300
            edges = to_undirected(torch.randint(0, count, (2, 900), generator=draw))
            one = Data(
                x=(torch.rand(count, 32, generator=draw) < 0.2).float(),
                edge_index=edges,
                y=torch.arange(count) % 7,
            )
            for index, part in enumerate(("train", "val", "test")):
                one[f"{part}_mask"] = torch.arange(count) % 3 == index
            self.data, self.slices = self.collate([one])

    torch_geometric.datasets.Planetoid = Planetoid
