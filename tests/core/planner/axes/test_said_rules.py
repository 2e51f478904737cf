"""Rules that operators say themselves."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from isoshard.core.domain.attention.partitioned_attention import Attention
from isoshard.core.planner.axes.flat_program import flattened
from isoshard.core.planner.axes.said_rules import parsed_rule, said_rule


def test_an_attention_is_one_operation_with_its_own_rule():
    q, k = (np.ones(shape, np.float32) for shape in ((2, 8, 16, 4), (2, 4, 32, 4)))
    program = jax.make_jaxpr(lambda q, k: Attention(False, 1.0)(q, k, k)[0])(q, k)
    (op,) = [one for one in flattened(program, said=True).scope.ops if one.equation is not None
             and one.name == "custom_partitioning"]  # fmt: skip
    rows, keys, *_ = op.rule.operands
    (batch, heads, length, _), (same, few, _, _) = rows, keys
    assert batch == same and few == heads[:1] and len(heads) == 2
    assert op.rule.results[0][:3] == (batch, heads, length) == op.rule.results[1]
    assert [op.rule.sizes[one] for one in heads] == [4, 2]
    inside = flattened(program)
    assert all(one.name != "custom_partitioning" for one in inside.scope.ops)


def test_other_operations_say_none():
    (add,) = jax.make_jaxpr(lambda x: x + 1)(1.0).eqns
    assert said_rule(add) is None


@pytest.mark.parametrize("text, shapes", [("i j, j k -> i k", ((2, 3), (3, 4), (2, 4))),
                                          ("i j, j k->i k", ((2, 3), (3, 4), (2, 4)))])  # fmt: skip
def test_a_text_is_read(text, shapes):
    rule = parsed_rule(text, shapes[:2], shapes[2:], {})
    assert rule.operands == (((0,), (1,)), ((1,), (2,))) and rule.results == (((0,), (2,)),)
    assert rule.sizes == (2, 3, 4)


def test_the_last_size_of_several_follows_from_the_others():
    rule = parsed_rule("(a b) -> (a b)", [(12,)], [(12,)], {"a": 3})
    assert rule.sizes == (3, 4)
