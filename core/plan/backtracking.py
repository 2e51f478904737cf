"""An upper bound, from its text, on the time that a regular expression can take.

Python's `re` backtracks, and has no time limit. Alternatives multiply: `.*` may end at any position
of the name, `(?:a|b)` has two ways to match, `a?` too. An unbounded repetition of something that
itself has several ways doubles them with each character: `(a+)+$` takes hours on 40 letters. So
such repetitions raise, and the ways of all other expressions are counted:

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
(n + k over k) ways for k of them and n characters; lookarounds count as if each were on its own.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from isoshard.core.runtime.caches import cached

from .layout_rules import PlanError

MOST_WAYS = 10**9
"""The most ways tried for one name: some seconds."""

# Beyond these an expression exceeds `MOST_WAYS` on any name of 200 characters (2**40 > 10**12;
# 208 over 8 > 10**13), so larger counts need not be distinguished and terms remain few.
_MAX_REPEATS = 40  # of two ways, one after the other
_MAX_UNBOUNDED = 8  # unbounded repetitions
_MAX_WAYS = 10**12


class TooManyWays(PlanError):
    """An expression for which the time cannot be bounded."""


class Ways:
    """The number of ways an expression can match, as a polynomial in the length of the name.

    Args:
        terms: the coefficients, by the number of unbounded repetitions in sequence and the number
            inside of lookarounds.
    """

    def __init__(self, terms: Mapping[tuple[int, int], int]):
        """Cap exponents and coefficients, so that the number of terms is bounded."""
        capped: Counter[tuple[int, int]] = Counter()
        for (repeats, looked), factor in terms.items():
            capped[min(_MAX_UNBOUNDED, repeats), min(_MAX_UNBOUNDED, looked)] += factor
        self.terms = {powers: min(_MAX_WAYS, factor) for powers, factor in capped.items()}

    @property
    def is_single(self) -> bool:
        """Whether there is one way only, for a name of any length."""
        return self.terms == {(0, 0): 1}

    def most(self, characters: int) -> int:
        """An upper bound on the ways for a name of so many characters."""
        return sum(
            factor * math.comb(characters + repeats, repeats) * (characters + 1) ** looked
            for (repeats, looked), factor in self.terms.items()
        )

    def longest(self) -> int:
        """The longest name within `MOST_WAYS`; -1 if even the empty name exceeds it."""
        if self.most(0) > MOST_WAYS:
            return -1
        longest, step = 0, 1 << 20
        while step:
            if self.most(longest + step) <= MOST_WAYS:
                longest += step
            step //= 2
        return longest

    def then(self, other: Ways) -> Ways:
        """The ways of this expression followed by another."""
        terms: Counter[tuple[int, int]] = Counter()
        for (a, b), factor in self.terms.items():
            for (c, d), other_factor in other.terms.items():
                terms[a + c, b + d] += factor * other_factor
        return Ways(terms)

    def either(self, other: Ways) -> Ways:
        """The ways of this expression or another."""
        return Ways(Counter(self.terms) + Counter(other.terms))

    def looked_at(self) -> Ways:
        """The ways of a lookaround that contains this expression."""
        terms: Counter[tuple[int, int]] = Counter()
        for (repeats, looked), factor in self.terms.items():
            terms[0, repeats + looked] += factor
        return Ways(terms)


_SINGLE = Ways({(0, 0): 1})
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_BOUNDS = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_OPENING = re.compile(
    r"\((?:\?(?:(?P<comment>\#[^)]*\))|(?P<back>P=\w+\))|(?P<flags>[a-zA-Z]+\))"
    r"|(?P<look><?[=!])|P<\w+>|\(\w+\)|[a-zA-Z-]*:|>))?"
)


@cached(4096)
def ways(expression: str) -> Ways:
    """Count the ways of an expression that `re.compile` takes.

    Raises:
        TooManyWays: it has an unbounded repetition of something with several ways, or is verbose.
    """
    if re.compile(expression).flags & re.VERBOSE:
        raise TooManyWays("the flag x (spaces and comments in the expression) is not supported")
    total, end = _alternatives(expression, 0)
    if end < len(expression):
        raise TooManyWays(f"{expression[end:]!r} is not understood")
    return total


def _alternatives(text: str, at: int) -> tuple[Ways, int]:
    """The ways up to a closing parenthesis or the end, and where that is."""
    total = None
    while True:
        branch, at = _sequence(text, at)
        total = branch if total is None else total.either(branch)
        if text[at : at + 1] != "|":
            return total, at
        at += 1


def _sequence(text: str, at: int) -> tuple[Ways, int]:
    total = _SINGLE
    while at < len(text) and text[at] not in "|)":
        begin = at
        item, at = _item(text, at)
        item, at = _repeated(text, begin, item, at)
        total = total if item is _SINGLE else total.then(item)
    return total, at


def _item(text: str, at: int) -> tuple[Ways, int]:
    if text[at] == "\\":
        return _SINGLE, at + 2
    if text[at] == "[" and (match := _CLASS.match(text, at)):
        return _SINGLE, match.end()
    if text[at] != "(":
        return _SINGLE, at + 1
    opening = _OPENING.match(text, at)
    assert opening is not None
    if opening["comment"] or opening["back"] or opening["flags"]:
        return _SINGLE, opening.end()
    inside, at = _alternatives(text, opening.end())
    if opening["look"]:
        inside = inside.looked_at()
    return inside, at + 1


def _repeated(text: str, begin: int, item: Ways, at: int) -> tuple[Ways, int]:
    """The ways of an item with its quantifier: `*`, `+`, `?`, `{2,3}`, each lazy or possessive."""
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
    if item.is_single:
        return Ways({(1, 0): 1} if most is None else {(0, 0): most - int(least) + 1}), at
    if most is None:
        raise TooManyWays(
            f"{text[begin:at]!r} repeats without bound what can match in several ways itself"
        )
    total, power = Ways({(0, 0): int(not least)}), _SINGLE
    for times in range(1, min(most, _MAX_REPEATS) + 1):
        power = power.then(item)
        if times >= min(least, _MAX_REPEATS):
            total = total.either(power)
    return total, at
