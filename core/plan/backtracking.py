"""How long a regular expression may take, told from its text.

Python's `re` tries one way after the other, and has no limit of time. Ways multiply: `.*` may end
in as many places as the name is long, `(?:a|b)` has two ways, `a?` too. A repetition without bound
of something that itself has several ways doubles them with each character: `(a+)+$` needs longer
than anybody waits for 40 letters. So such repetitions are refused, and of the others the ways are
counted:

>>> ways("(?:.*[.])?(?:up|down)[.]weight").most(100)
204
>>> ways("(a+)+$")
Traceback (most recent call last):
    ...
isoshard.core.plan.backtracking.TooManyWays: '(a+)+' repeats without bound what can match in \
several ways itself
>>> ways("(?:a|b)*")
Traceback (most recent call last):
    ...
isoshard.core.plan.backtracking.TooManyWays: '(?:a|b)*' repeats without bound what can match in \
several ways itself

The count is an upper bound: repetitions of single characters share the name among them, in
(n + k over k) ways for k of them and n characters; lookarounds count as if each stood alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from isoshard.core.runtime.caches import cached

from .layout_rules import PlanError

MOST_WAYS = 10**9
"""What is tried for one name at most: some seconds."""

# What is too much for every name, so that larger numbers are all the same.
_TIMES = 40  # of two ways, one after the other
_MANY = 8  # repetitions without bound
_CAP = 10**12  # ways


class TooManyWays(PlanError):
    """An expression for which the time cannot be bounded."""


class Ways:
    """In how many ways an expression can be tried, as a sum of terms.

    Args:
        terms: what does not grow with the name, by the number of repetitions without bound that
            follow each other, and of those inside of lookarounds.
    """

    def __init__(self, terms: Mapping[tuple[int, int], int]):
        """Keep the terms; of what is too much anyway, as little as shows it."""
        kept: Counter[tuple[int, int]] = Counter()
        for (repeats, looked), factor in terms.items():
            kept[min(_MANY, repeats), min(_MANY, looked)] += factor
        self.terms = {powers: min(_CAP, factor) for powers, factor in kept.items()}

    @property
    def is_one(self) -> bool:
        """Whether there is one way only, for a name of any length."""
        return self.terms == {(0, 0): 1}

    def most(self, characters: int) -> int:
        """The ways for a name of so many characters, at most."""
        return sum(
            factor * math.comb(characters + repeats, repeats) * (characters + 1) ** looked
            for (repeats, looked), factor in self.terms.items()
        )

    def longest(self) -> int:
        """How long a name may be for `MOST_WAYS`; -1 if not even the empty one may."""
        if self.most(0) > MOST_WAYS:
            return -1
        longest, step = 0, 1 << 20
        while step:
            if self.most(longest + step) <= MOST_WAYS:
                longest += step
            step //= 2
        return longest

    def then(self, other: Ways) -> Ways:
        """Of this, and another after it."""
        terms: Counter[tuple[int, int]] = Counter()
        for (a, b), one in self.terms.items():
            for (c, d), two in other.terms.items():
                terms[a + c, b + d] += one * two
        return Ways(terms)

    def either(self, other: Ways) -> Ways:
        """Of this, or another in its place."""
        return Ways(Counter(self.terms) + Counter(other.terms))

    def looked_at(self) -> Ways:
        """Of a lookaround around this."""
        terms: Counter[tuple[int, int]] = Counter()
        for (repeats, looked), factor in self.terms.items():
            terms[0, repeats + looked] += factor
        return Ways(terms)


_ONE = Ways({(0, 0): 1})
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_BOUNDS = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_OPENING = re.compile(
    r"\((?:\?(?:(?P<comment>\#[^)]*\))|(?P<back>P=\w+\))|(?P<flags>[a-zA-Z]+\))"
    r"|(?P<look><?[=!])|P<\w+>|\(\w+\)|[a-zA-Z-]*:|>))?"
)


@cached(4096)
def ways(expression: str) -> Ways:
    """Count the ways of an expression.

    Args:
        expression: one that `re.compile` takes.

    Returns:
        The ways.

    Raises:
        TooManyWays: it has a repetition without bound of what has several ways, or is verbose.
    """
    if re.compile(expression).flags & re.VERBOSE:
        raise TooManyWays("the flag x (spaces and comments in the expression) is not read here")
    found, end = _alternatives(expression, 0)
    if end < len(expression):
        raise TooManyWays(f"{expression[end:]!r} is not understood")
    return found


def _alternatives(text: str, at: int) -> tuple[Ways, int]:
    """Up to a closing parenthesis or the end."""
    found = None
    while True:
        branch, at = _sequence(text, at)
        found = branch if found is None else found.either(branch)
        if text[at : at + 1] != "|":
            return found, at
        at += 1


def _sequence(text: str, at: int) -> tuple[Ways, int]:
    found = _ONE
    while at < len(text) and text[at] not in "|)":
        begin = at
        item, at = _item(text, at)
        item, at = _repeated(text, begin, item, at)
        found = found if item is _ONE else found.then(item)
    return found, at


def _item(text: str, at: int) -> tuple[Ways, int]:
    if text[at] == "\\":
        return _ONE, at + 2
    if text[at] == "[" and (found := _CLASS.match(text, at)):
        return _ONE, found.end()
    if text[at] != "(":
        return _ONE, at + 1
    opening = _OPENING.match(text, at)
    assert opening is not None
    if opening["comment"] or opening["back"] or opening["flags"]:
        return _ONE, opening.end()
    inside, at = _alternatives(text, opening.end())
    if opening["look"]:
        inside = inside.looked_at()
    return inside, at + 1


def _repeated(text: str, begin: int, item: Ways, at: int) -> tuple[Ways, int]:
    """With what stands behind an item: `*`, `+`, `?`, `{2,3}`, each lazy or possessive."""
    bounds = _BOUNDS.match(text, at) if text[at : at + 1] == "{" else None
    if text[at : at + 1] in ("*", "+", "?"):
        least, most = ("*+?".index(text[at]) == 1, 1 if text[at] == "?" else None)
        at += 1
    elif bounds and (bounds[1] or bounds[3]):
        least = int(bounds[1] or 0)
        most = least if not bounds[2] else int(bounds[3]) if bounds[3] else None
        at = bounds.end()
    else:
        return item, at
    if text[at : at + 1] in ("?", "+"):
        at += 1
    if item.is_one:
        return Ways({(1, 0): 1} if most is None else {(0, 0): most - int(least) + 1}), at
    if most is None:
        raise TooManyWays(
            f"{text[begin:at]!r} repeats without bound what can match in several ways itself"
        )
    total, power = Ways({(0, 0): int(not least)}), _ONE
    for times in range(1, min(most, _TIMES) + 1):
        power = power.then(item)
        if times >= min(least, _TIMES):
            total = total.either(power)
    return total, at
