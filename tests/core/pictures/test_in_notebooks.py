"""What a notebook or treescope shows of pictures, reports, plans, arrays and tensors."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
import torch
import treescope

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan

DisplayFormatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter


def _mesh():
    return iso.make_mesh((2, 4), ("x", "y"))


def _found():
    w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    return iso.planner.search(lambda w, x: x @ w, (w, w), "v5e:2x4")


SHOWN = {
    "a layout": lambda: iso.visualize(P("x"), shape=(4,), mesh=_mesh()),
    "what was counted": iso.metrics.report,
    "a resolved plan": lambda: Plan({"w": P("x")}).resolve({"w": (8, 4)}, _mesh()),
    "a found plan": _found,
}


@pytest.mark.parametrize("name", SHOWN)
def test_text_and_html_say_the_same(name):
    made = SHOWN[name]()
    shown = DisplayFormatter().format(made)[0]
    said = "".join(ElementTree.fromstring(shown["text/html"]).itertext())
    for word in re.findall(r"\w+", str(made)):
        assert word in said
    if isinstance(made, str):
        assert shown["text/plain"] == str(made)


def test_a_plan_has_a_line_for_each_factor():
    plan = Plan.fsdp("x") * Plan({"*.w": P(None, "y")})
    html = DisplayFormatter().format(plan)[0]["text/html"]
    (lines,) = ElementTree.fromstring(html).itertext()
    assert lines == f"{plan.factors[0]!r} *\n{plan.factors[1]!r}"


def _lazy():
    return {"t": xs.mark_sharding(torch.arange(8.0, device="jax"), _mesh(), P("y"))}


TREES = {
    "a layout": (SHOWN["a layout"], "2 blocks of"),
    "an array": (lambda: iso.shard(np.ones((8, 4), np.float32), _mesh(), P("x")), "float32(8, 4)"),
    "an array in blocks": (
        lambda: iso.shard(np.ones(5, np.float32), _mesh(), P("y"), uneven="pad"),
        r"float32[5] in float32[8], axis 0 in blocks of 2: 2, 2, 1, 0 valid",
    ),
    "a tensor": (
        _lazy,
        "tensor([0., 1., 2., 3., 4., 5., 6., 7.], device='jax:0', sharding=P('y',))",
    ),
    "a module": (
        lambda: iso.shard(torch.nn.Linear(4, 8), _mesh(), Plan({"*": P("x")})),
        "weight=<isoshard.torch_bridge.tensors.tensor.XLAShardedTensor float32(8, 4)",
    ),
    "a plan": (lambda: Plan({"*.w": P("x")}), "'*.w', P('x',)"),
}


@pytest.mark.filterwarnings("ignore:The chararray class is deprecated")  # treescope with NumPy 2.5
@pytest.mark.parametrize("name", TREES)
def test_treescope_shows_it(name):
    make, said = TREES[name]
    made = make()
    assert said in treescope.render_to_text(made)
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        assert "treescope" in treescope.render_to_html(made)


def test_tensors_have_no_names():
    assert torch.ones(2, 3, device="jax").names == (None, None)
    assert torch.ones((), device="jax").names == ()
