"""Sizes, as people write and read them."""

import pytest

from pytest_torchmem.errors import UsageError
from pytest_torchmem.units import format_change, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (1536, 1536),
        ("1536", 1536),
        ("512 MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("2e9", 2_000_000_000),
        (" 2 gib ", 2 * 1024**3),
        ("1_000 kB", 1_000_000),
        ("1.5 B", 2),
        ("0.1 KiB", 103),
        (".5KiB", 512),
        ("1 PiB", 1024**5),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "value", ["", "2 GB of ram", "GiB", "-1", "1.2.3 MB", "1 XB", "1e", "_", True, 1.5, None, -1]
)
def test_what_is_no_size(value):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-1536, "-1.50 KiB"),
        (102_400, "100.0 KiB"),
        (1_048_575, "1.00 MiB"),
        (1_048_576, "1.00 MiB"),
        (1_563_000_000, "1.46 GiB"),
        (5 * 1024**6, "5120.0 PiB"),
    ],
)
def test_format(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (1024, 1024, "0 B"),
        (1024, 2048, "+1.00 KiB (+100.0 %)"),
        (2048, 1024, "-1.00 KiB (-50.0 %)"),
        (0, 12, "+12 B"),
    ],
)
def test_format_change(before, after, text):
    assert format_change(before, after) == text
