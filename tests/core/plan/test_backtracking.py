"""A plan's regular expressions end: what could take forever is refused when the plan is made."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import isoshard as iso
from isoshard.core.plan import PlanError
from isoshard.core.plan.backtracking import MOST_WAYS, TooManyWays, ways
from isoshard.core.plan.rule_patterns import SHORTEST, check_patterns, matches


@pytest.mark.parametrize(
    ("expression", "characters", "count"),
    [
        (".*", 9, 10),
        (".*.*", 9, 55),
        ("(?:ab)*", 9, 10),
        ("a|bc|d", 9, 3),
        ("(?:a|bc)(?P<n>d|e)", 9, 4),
        ("(?:a|b){3}", 9, 8),
        ("(?:a|b){1,2}", 9, 6),
        ("(?:.*a){2}", 9, 55),
        ("a{2,4}", 9, 3),
        ("a{x}", 9, 1),
        (r"\(a*\|\)", 9, 10),
        ("[)(*|]*", 9, 10),
        (r"[^]\]|*]x", 9, 1),
        ("(?#a+*|)a", 9, 1),
        ("(?i)(?s:a|b)", 9, 2),
        (r"(?P<x>a)(?P=x)\1", 9, 1),
        ("(?!.*norm).*", 9, 100),
        ("(?<=a)(?<!b)(?=c|d)x", 9, 2),
        ("(a)?(?(1)b|c)", 9, 4),
        ("|", 9, 2),
    ],
)
def test_the_ways_are_counted(expression, characters, count):
    assert ways(expression).most(characters) == count


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+$", "(a*)*", "(?:a|a)*$", "(a?)+", "(?:.*x)*", "([a-z]+[.])*w", "(?P<n>a|b)+?",
        "(?:(?:a|b))*", "(?i:a+)*", "(?:a{1,2}){3,}", "(?=.*a)*", "(?>a+)+", "(?:a|b)*+",
        "((((a+)))*)",
    ],
)  # fmt: skip
def test_nested_repetitions_are_refused(expression):
    with pytest.raises(PlanError, match=r"could take forever: .* repeats without bound what can"):
        iso.Plan({f"re:{expression}": None})


@pytest.mark.parametrize(
    "expression",
    [
        "a?" * 30 + "a" * 30, "(?:a|aa){40}", "(?:a|aa){200}", "(?:a|aa){200,300}",
        ".*a.*a.*a.*a.*", "(.*){100}", "((.*|a){100}){100}", "((a{0,100}){100}){100}",
        "(?!.*.*.*.*a)b", "(?:a|b)" * 40,
    ],
)  # fmt: skip
def test_too_many_ways_are_refused_at_once(expression):
    began = time.process_time()
    with pytest.raises(PlanError, match=r"in more than 1,000,000,000 ways; write a glob, \[ab\]\*"):
        iso.Plan({f"re:{expression}": None})
    assert time.process_time() - began < 5


def test_every_fault_is_in_one_message():
    with pytest.raises(PlanError) as caught:
        iso.Plan({"re:(": None, "re:(a+)+": None, "re:(?x) a b": None, "re:a{99999999999}": None})
    said = str(caught.value)
    assert "'re:(' is not a regular expression" in said
    assert "'re:(a+)+' could take forever" in said
    assert "the flag x (spaces and comments in the expression) is not supported" in said
    assert "'re:a{99999999999}' is not a regular expression" in said


def test_groups_inside_groups_without_end():
    with pytest.raises(PlanError, match=r"not a regular expression|could take forever"):
        check_patterns(["re:" + "(" * 5000 + ")" * 5000])


def test_activations_are_checked_too():
    with pytest.raises(PlanError, match="could take forever"):
        iso.Plan(activations={"re:(a+)+$": None})


def test_a_name_of_any_reasonable_length_is_matched():
    pattern = "re:.*layers.*attn.*proj.*"
    name = "layers.0.attn.q_proj.weight"
    assert matches(pattern, name.rjust(SHORTEST, "x"))
    with pytest.raises(PlanError, match=r"on a name of 1027 characters \('xxx.*, and is for names"):
        matches(pattern, "x" * 1000 + name)
    assert matches("re:.*[.]weight", "x" * 100_000 + ".weight")
    assert not matches("*a*a*a*a*a*a*a*b", "a" * 5000)  # globs never go back


def test_the_plan_of_the_finding_ends_where_re_does_not():
    with pytest.raises(PlanError):
        matches("re:(a+)+$", "a" * 40 + "!")


ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^b]", r"\w", "", "^", "$"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(
            inner,
            st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{0,3}", "{1,}", "{5}", "*+"]),
        ).map(lambda pair: f"({pair[0]}){pair[1]}"),
        inner.map(lambda one: f"(?={one})"),
        inner.map(lambda one: f"(?!{one})"),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS, st.sampled_from(["a", "b", "ab", "aab"]), st.integers(0, 40))
@example("(?:a|a)(?:a|a)(a*)", "a", 40)
def test_what_is_not_refused_ends(expression, letters, times):
    """On names that almost match, where there is the most to try."""
    name = letters * times + "!"
    try:
        most = ways(expression).most(len(name))
    except TooManyWays:
        return
    if most > MOST_WAYS // 100:
        return
    began = time.process_time()
    re.fullmatch(expression, name)
    assert time.process_time() - began < 2, expression
