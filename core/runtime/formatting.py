"""Numbers, lists and tables as people read them, in messages and reports.

>>> human_bytes(1536), human_seconds(0.0123), human_seconds(75), human_flops(3.2e13)
('1.5 KiB', '12.3 ms', '75.0 s', '32.0 TFLOP')
>>> percent(1, 3), count_of(1024, "device"), listed(["a", "b", "c", "d"], most=2)
('33 %', '1,024 devices', 'a, b and 2 more')
>>> print("\\n".join(table([("name", "bytes"), ("w", "8 B")], right=1)))
name  bytes
w       8 B
"""

from __future__ import annotations

from collections.abc import Sequence


def human_bytes(size: float) -> str:
    """A number of bytes with a binary unit and one decimal; whole bytes below one KiB.

    Example:
        >>> human_bytes(512), human_bytes(1536), human_bytes(3 << 20)
        ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """A time with a unit and three digits: "1.20 s", "450 us"; "0 s" for nothing."""
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def human_flops(count: float) -> str:
    """A number of floating-point operations with a decimal unit: "32.0 TFLOP"."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{_three_digits(count / size)} {unit}FLOP"
    return f"{count:.0f} FLOP"


def percent(amount: float, total: float) -> str:
    """A share in whole percents; "-" of nothing."""
    return f"{100 * amount / total:.0f} %" if total else "-"


def count_of(count: int, singular: str) -> str:
    """A number of things: "1 device", "1,024 devices"."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def listed(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """Items in one line; of more than `most` the first ones, and how many there are besides.

    Example:
        >>> listed(["a", "b"], most=2), listed(["a", "b", "c"], most=2, separator="; ")
        ('a, b', 'a; b; and 1 more')
    """
    text = separator.join(items[:most])
    if len(items) <= most:
        return text
    comma = "" if separator == ", " else separator.rstrip()
    return f"{text}{comma} and {len(items) - most} more"


def table(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Lines of text with columns as wide as their widest cell, without blanks at their ends.

    Args:
        rows: all of one length; the header, if there is one, first.
        right: the column that is set to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column == right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"
