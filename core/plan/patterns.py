"""Patterns: how a plan's rules name leaves and modules.

A pattern is a glob over the whole name (`*` also crosses dots, `?`, `[..]`), or a regular
expression over the whole name after `re:`. One that starts with a comment goes by it in tables:

>>> matches("blocks.*.weight", "blocks.0.mlp.weight"), matches("re:.*[.][qkv]", "a.o")
(True, False)
>>> label("re:(?#column).*[.](?:up|gate)[.].*"), label("*.bias")
('column', '*.bias')
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from typing import Any

from .rules import PlanError


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits a whole name."""
    return _matcher(pattern).fullmatch(name) is not None


def label(pattern: str) -> str:
    """What a pattern is called in tables: its leading comment, or itself."""
    found = re.match(r"re:\(\?#([^)]*)\)", pattern)
    return found[1] if found else pattern


def check_patterns(patterns: Iterable[Any]) -> None:
    """Check the patterns of one list of rules.

    Args:
        patterns: in order.

    Raises:
        PlanError: one is given twice, is no string or no regular expression; all in one message.

    Example:
        >>> check_patterns(["a.*", "re:a[.].*"])
    """
    patterns = list(patterns)
    wrong = [f"{p!r} is no string" for p in patterns if not isinstance(p, str)]
    texts = [p for p in patterns if isinstance(p, str)]
    wrong += [f"{p!r} is given twice" for p in dict.fromkeys(texts) if texts.count(p) > 1]
    for pattern in dict.fromkeys(texts):
        try:
            _matcher(pattern)
        except re.error as error:
            wrong.append(f"{pattern!r} is no regular expression: {error}")
    if wrong:
        raise PlanError(f"the patterns of a plan are names, globs or 're:..': {'; '.join(wrong)}")


@functools.lru_cache(maxsize=4096)
def _matcher(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern[3:])
    return re.compile(fnmatch.translate(pattern))
