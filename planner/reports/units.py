"""Numbers as people read them; bytes are `isoshard.core.runtime.metrics.human_bytes`.

>>> human_seconds(0.0123), human_seconds(75), human_flops(3.2e13), percent(1, 3)
('12.3 ms', '75.0 s', '32.0 TFLOP', '33 %')
"""

from __future__ import annotations


def human_seconds(seconds: float) -> str:
    """Write a time with a unit and three digits.

    Args:
        seconds: how long.

    Returns:
        E.g. "1.20 s", "12.3 ms", "450 us"; "0 s" for nothing.
    """
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def human_flops(count: float) -> str:
    """Write a number of floating-point operations with a decimal unit.

    Args:
        count: how many.

    Returns:
        E.g. "32.0 TFLOP".
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{_three_digits(count / size)} {unit}FLOP"
    return f"{count:.0f} FLOP"


def percent(of: float, whole: float) -> str:
    """Write a share.

    Args:
        of: the share.
        whole: what it is a share of.

    Returns:
        Whole percents; of nothing "-".
    """
    return f"{100 * of / whole:.0f} %" if whole else "-"


def count_of(number: int, what: str) -> str:
    """Write a number of things.

    Args:
        number: how many.
        what: their name in the singular.

    Example:
        >>> count_of(1, "device"), count_of(1024, "device")
        ('1 device', '1,024 devices')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _three_digits(value: float) -> str:
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"
