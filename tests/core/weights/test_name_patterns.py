"""Names with captures."""

import time

import pytest

from isoshard.core.weights.name_patterns import Pattern
from isoshard.core.weights.weight_errors import WeightError


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("h.{i}.w", "h.12.w", {"i": "12"}),
        ("h.{i}.w", "h.1.2.w", None),
        ("h_{i}.w", "h_3.w", {"i": "3"}),
        ("{p*}.w", "w", {"p": ""}),
        ("{p*}.w", "a.b.w", {"p": "a.b"}),
        ("{p*}.w", "aw", None),
        ("a.{p*}", "a", {"p": ""}),
        ("a.{p*}", "a.b.c", {"p": "b.c"}),
        ("a.{p*}", "ab", None),
        ("a.{p*}.w", "a.w", {"p": ""}),
        ("{p*}.m.{q*}.w", "m.w", {"p": "", "q": ""}),
        ("{p*}.m.{q*}.w", "a.m.b.c.w", {"p": "a", "q": "b.c"}),
        ("{all*}", "a..b.", {"all": "a..b."}),
        ("a.b", "a.b", {}),
        ("a.b", "aXb", None),
    ],
)
def test_matches(pattern, name, found):
    assert Pattern(pattern).match(name) == found


@pytest.mark.parametrize("name", ["h.3.w", "h.3.a.b.w"])
def test_fill_undoes_match(name):
    pattern = Pattern("h.{i}.{rest*}.w")
    assert pattern.fill(pattern.match(name)) == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{i}.{i}", "named twice"),
        ("a*", "outside of a capture"),
        ("a{p*}", "segments of the path"),
        ("{p*}.{q*}", "next to each other"),
        ("{a}{b}{c}{d}{e}x", "more than 4 captures have a star or share a segment"),
        ("{a*}.x.{b*}.x.{c}_{d}_{e}", "could match in too many ways"),
        (3, "must be a string"),
    ],
)
def test_a_wrong_pattern_says_why(text, why):
    with pytest.raises(WeightError, match=why):
        Pattern(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{a*}.x.{b*}.x.{c*}.x.{d*}.y", "x." * 100 + "z"),
        ("{a}{b}{c}{d}x", "a" * 120),
        (".".join(f"{{c{n}}}" for n in range(40)) + ".w", ".".join("ab" * 20) + ".v"),
    ],
)
def test_a_pattern_that_fits_almost_ends(text, name):
    began = time.process_time()
    assert Pattern(text).match(name) is None
    assert time.process_time() - began < 10
