"""Sizes in bytes, between what people write ("2 GiB") and ``int``."""

import re

from pytest_torchmem.errors import UsageError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
MOST = 2**63 - 1
"""The most bytes that anything can have."""
_TOO_MUCH = "no memory has as many bytes"
_PATTERN = r"\s*([0-9._]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*"


def parse_size(value: int | str) -> int:
    """Return ``value`` in bytes: an ``int``, or text such as ``"512 MiB"``, ``"1.5GB"``, ``"2e9"``.

    ``KiB``, ``MiB``, … are powers of 1024 and ``kB``, ``MB``, … powers of 1000, without regard to
    case; a fraction of a byte is rounded up. Raises ``UsageError`` for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{value!r} is not a size: {_ACCEPTED}")
    if isinstance(value, int):
        if value < 0:
            raise UsageError(f"{value} is not a size: a size cannot be negative")
        if value > MOST:
            raise UsageError(f"{hex(value)[:20]}… is not a size: {_TOO_MUCH}")
        return value
    if len(value) > 100:
        raise UsageError(f"{value[:40]!r}… is not a size: {_ACCEPTED}")
    match = re.fullmatch(_PATTERN, value, re.IGNORECASE)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{value!r} is not a size: {_ACCEPTED}")
    from decimal import Decimal  # few traces are given a size as text

    try:
        size = Decimal(match.group(1).replace("_", "")) * factor
        if size > MOST:  # before it is written out: "1e999999999" has as many digits
            raise UsageError(f"{value!r} is not a size: {_TOO_MUCH}")
        return int(size.to_integral_value(rounding="ROUND_CEILING"))
    except ArithmeticError:
        raise UsageError(f"{value!r} is not a size: {_ACCEPTED}") from None


_ACCEPTED = (
    "write an int of bytes or a text such as '512 MiB', '1.5GB' or '2e9' "
    "(B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB)"
)


def format_size(size: int | None) -> str:
    """Return ``size`` bytes with three or four significant digits: ``"1.46 GiB"``, ``"-12 B"``.

    A size that is not there is ``"-"``.
    """
    if size is None:
        return "-"
    sign, number = ("-" if size < 0 else ""), float(abs(size))
    for unit in _BINARY_UNITS:
        if number < 1023.995 or unit == _BINARY_UNITS[-1]:
            break
        number /= 1024
    digits = 0 if unit == "B" else 2 if number < 99.995 else 1
    return f"{sign}{number:.{digits}f} {unit}"


def format_count(count: int) -> str:
    """Return ``count`` with three significant digits: ``"1.46 G"``, ``"12"``."""
    number = float(count)
    for unit in ("", "k", "M", "G", "T", "P"):
        if number < 999.5 or unit == "P":
            break
        number /= 1000
    digits = 0 if not unit or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}".rstrip()


def format_change(before: int | None, after: int | None) -> str:
    """Return the step from ``before`` to ``after`` bytes: ``"+1.20 MiB (+3.4 %)"``.

    Where one of them is not there it is empty.
    """
    if before is None or after is None:
        return ""
    step = after - before
    if step == 0:
        return "0 B"
    sign = "+" if step > 0 else ""
    percent = f" ({format_percent(step, before)})" if before else ""
    return f"{sign}{format_size(step)}{percent}"


def format_step(before: int | None, after: int | None) -> tuple[str, str, str]:
    """Return the cells of a table for both sizes, and for the step between them."""
    return format_size(before), format_size(after), format_change(before, after)


def format_percent(step: int, of: int) -> str:
    """Return ``step`` as a part of ``of``: ``"+3.4 %"``."""
    return f"{step / of:+.1%}".replace("%", " %")
