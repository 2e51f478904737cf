"""Old forms work, warn at the line of the caller, and name the new form."""

import inspect

import numpy as np
import pytest
from jax.sharding import NamedSharding

import isoshard as iso
from isoshard.core import deprecations
from isoshard.core.blocks.block_layout import BlockLayout


@deprecations.accepts_old(deprecations.keyword("old", "new"))
def doubled(x: int, *, new: int = 1) -> int:
    """The product."""
    return x * new * 2


def test_an_old_keyword_warns_at_the_line_of_the_caller():
    with pytest.warns(
        DeprecationWarning, match=r"^doubled\(old=\.\.\) is now doubled\(new=\.\.\); "
    ):
        assert doubled(3, old=2) == 12
    with pytest.warns(DeprecationWarning) as caught:
        doubled(3, old=2)
    assert caught[0].filename == __file__


def test_the_new_form_does_not_warn_and_keeps_its_signature():
    assert doubled(3, new=2) == 12 and doubled(3) == 6
    assert list(inspect.signature(doubled).parameters) == ["x", "new"]


def test_both_forms_at_once_are_an_error():
    with pytest.raises(TypeError, match=r"doubled\(\) got 'new' and 'old', which is its old name"):
        doubled(3, new=2, old=2)


def test_a_name_that_moved_is_that_of_the_new_module():
    with pytest.warns(
        DeprecationWarning, match=r"^there\.Plan is now isoshard\.core\.plan\.Plan; "
    ):
        found = deprecations.moved_attribute("there", "Plan", "isoshard.core.plan")
    assert found.__name__ == "Plan"


def test_a_layout_is_compared_by_its_old_name():
    sharding = NamedSharding(iso.make_mesh((2,), ("x",)), iso.P("x"))
    layout = BlockLayout(sharding, (4,), (4,), ((2, 2),))
    with pytest.warns(DeprecationWarning, match=r"BlockLayout\.alike is now BlockLayout\.is_equiv"):
        assert layout.alike(layout)


def test_rules_match_leaves_by_their_old_name():
    rules = iso.weights.WeightMap([iso.weights.Rule("a", "b")])
    with pytest.warns(DeprecationWarning, match=r"match\(given=\.\.\) is now match\(leaves=\.\.\)"):
        matching, _ = rules.match(given={"a": np.ones(2)})
    assert len(matching.groups) == 1
