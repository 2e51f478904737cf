"""Warnings of the line of user code that is running."""

from __future__ import annotations

import warnings

from .metrics import user_frame


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn of the line of user code that is running; Python shows it once per line.

    Example:
        >>> with warnings.catch_warnings(record=True) as heard:
        ...     warnings.simplefilter("always")
        ...     warn_user("rows are padded", UserWarning)
        >>> print(heard[0].message)
        rows are padded
    """
    frame = user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
