"""Our rules for operators that the proposal does not mention: what follows, and what is said."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.runtime.jaxprs import CALLS, ELEMENTWISE, equations
from isoshard.onnx_bridge import ModelError, validate
from isoshard.onnx_bridge.checking.operator_rules.elementwise_factors import (
    BROADCAST,
    BROADCAST_EXTENSIONS,
    UNARY,
    UNARY_EXTENSIONS,
)
from isoshard.onnx_bridge.executor.operators import find
from tests.onnx_bridge.checking.one_node import constant, inferred, model, placed, rules, t

COMBINED, MOVED = "traffic.collective", "traffic.reshard"

# operator, inputs, shape of the output, its layout, what is said, attributes
CASES = {
    "relu": ("Relu", [t(4, 8, spec=P("x", "y"))], (4, 8), P("x", "y"), [], {}),
    "div": ("Div", [t(4, 8, spec=P("x")), t(8, spec=P())], (4, 8), P("x"), [], {}),
    "transpose": ("Transpose", [t(4, 6, 8, spec=P("x", None, "y"))], (8, 4, 6), P("y", "x"), [], {
        "perm": [2, 0, 1]
    }),
    "to heads": ("Reshape", [t(2, 6, 8, spec=P("x", None, "y")), constant(2, 6, 4, 2)],
                 (2, 6, 4, 2), P("x", None, "y"), [], {}),
    "from heads": ("Reshape", [t(2, 6, 4, 2, spec=P("x", None, "y")), constant(2, 6, 8)],
                   (2, 6, 8), P("x", None, "y"), [], {}),
    "inner axis": ("Reshape", [t(6, 4, spec=P(None, "x")), constant(24)], (24,), P(), [MOVED], {}),
    "odd heads": ("Reshape", [t(6, spec=P("x")), constant(3, 2)], (3, 2), P(), [MOVED], {}),
    "unsqueeze": ("Unsqueeze", [t(4, spec=P("x")), constant(0)], (1, 4), P(None, "x"), [], {}),
    "expand": ("Expand", [t(4, 1, spec=P("x")), constant(2, 4, 6)], (2, 4, 6), P(None, "x"), [],
               {}),
    "concat": ("Concat", [t(4, 2, spec=P("x")), t(4, 6, spec=P("x"))], (4, 8), P("x"), [], {
        "axis": 1
    }),
    "concat along": ("Concat", [t(4, 2, spec=P("x")), t(4, 2, spec=P("x"))], (8, 2), P(),
                     [MOVED, MOVED], {"axis": 0}),
    "slice": ("Slice", [t(4, 8, spec=P("x", "y")), constant(0), constant(2), constant(1)], (4, 2),
              P("x"), [MOVED], {}),
    "pad": ("Pad", [t(4, 8, spec=P("x")), constant(0, 1, 0, 1)], (4, 10), P("x"), [], {}),
    "gather columns": ("Gather", [t(16, 8, spec=P(None, "y")), t(4, 6, spec=P("x"))], (4, 6, 8),
                       P("x", None, "y"), [], {}),
    "gather rows": ("Gather", [t(16, 8, spec=P("y")), t(4, 6, spec=P("x"))], (4, 6, 8), P("x"),
                    [COMBINED], {}),
    "softmax along": ("Softmax", [t(4, 8, spec=P(None, "x"))], (4, 8), P(None, "x"), [COMBINED],
                      {}),
    "layer norm": ("LayerNormalization", [t(4, 8, spec=P("x")), t(8), t(8)], (4, 8), P("x"), [],
                   {}),
    "layer norm along": ("LayerNormalization", [t(4, 8, spec=P(None, "y")), t(8, spec=P("y"))],
                         (4, 8), P(None, "y"), [COMBINED], {}),
    "argmax": ("ArgMax", [t(4, 8, spec=P("x", "y"))], (4, 1), P("x"), [COMBINED], {"axis": 1}),
    "cumsum": ("CumSum", [t(4, 8, spec=P("x", "y")), constant(1)], (4, 8), P("x"), [MOVED], {}),
    "determinant": ("Det", [t(4, 8, 8, spec=P("x", None, "y"))], (4,), P("x"), [MOVED], {}),
    "attention": ("Attention", [t(2, 4, 6, 8, spec=P("x", "y"))] * 3, (2, 4, 6, 8), P("x", "y"), [],
                  {}),
    "convolution": ("Conv", [t(4, 3, 8, 8, spec=P("x")), t(6, 3, 3, 3, spec=P("y")),
                             t(6, spec=P("y"))], (4, 6, 6, 6), P("x", "y"), [], {}),
    "depthwise": ("Conv", [t(4, 6, 8, spec=P(None, "y")), t(6, 1, 3, spec=P("y"))], (4, 6, 6),
                  P(None, "y"), [], {"group": 6}),
    "halo": ("MaxPool", [t(4, 2, 8, spec=P(None, None, "x"))], (4, 2, 6), P(None, None, "x"),
             [COMBINED], {"kernel_shape": [3]}),
    "batch norm": ("BatchNormalization", [t(4, 2, 8, spec=P("x", "y")), *[t(2, spec=P("y"))] * 4],
                   (4, 2, 8), P("x", "y"), [], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_follows_for_the_output(name):
    op, inputs, shape, spec, said, attributes = CASES[name]
    opset = 23 if op == "Attention" else 20
    made = model(op, inputs, [t(*shape)], opset=opset, **attributes)
    (out,), found = inferred(made)
    assert str(out) == str(placed(shape, spec))
    assert (out, found) == (placed(shape, spec), said)


def test_both_results_of_a_split():
    made = model("Split", [t(4, 8, spec=P("x", "y")), constant(4, 4)], [t(4, 4), t(4, 4)], axis=1)
    assert inferred(made) == ([placed((4, 4), P("x"))] * 2, [MOVED])


@pytest.mark.parametrize(("op", "inputs", "rule"), [
    ("Div", [t(4, 8, spec=P("x")), t(4, 8, spec=P(None, "x"))], "extension.shards"),
    ("Div", [t(4, 8, spec=P("x")), t(4, 8)], "extension.unsharded-input"),
    ("Div", [t(4, 8, spec=P("x")), t(4, 8, spec=P("y"))], "extension.devices"),
    ("PRelu", [t(4, 2, spec=P("x")), t(1, 2, spec=P(("x", "y")))], "extension.broadcast"),
])  # fmt: skip
def test_faults_of_ours_are_warnings(op, inputs, rule):
    if rule == "extension.broadcast":  # an axis of size 1 in four shards: only literal specs say it
        made = model(op, [inputs[0], t(1, 2, spec=P())], [t(4, 2)])
        spec = made.graph.node[0].device_configurations[0].sharding_spec[1]
        del spec.index_to_device_group_map[:]
        spec.device[:] = [0, 1, 2, 3]
        spec.sharded_dim.add(axis=0).simple_sharding.add(num_shards=4)
    else:
        made = model(op, inputs, [t(*inputs[0].shape)])
    found = [one for one in validate(made) if one.rule == rule]
    assert found
    assert {one.severity for one in found} == {"warning"}


@pytest.mark.parametrize(("op", "inputs", "out", "attributes", "why"), [
    ("Slice", [t(4, spec=P("x")), t(1), t(1), t(1)], t(2), {}, "input 3 is computed"),
    ("Concat", [t(4, spec=P("x"))], t(4), {"axis": 9}, "axis 9 of a tensor of rank 1"),
    ("Concat", [t(4, spec=P("x"))], t(4), {"axis": "z"}, "axis is no integer"),
    ("Transpose", [t(4, 8, spec=P("x"))], t(8, 4), {"perm": [0, 7]}, "no order of 2 axes"),
    ("Transpose", [t(4, 8, spec=P("x"))], t(8, 4), {"perm": [0.5]}, "no integers"),
    ("Gemm", [t(4, 8, 2, spec=P("x")), t(8, 6)], t(4, 6), {}, "its input 0 has rank 3"),
    ("Einsum", [t(4, spec=P("x"))], t(4), {"equation": "...->..."}, "equation '...->...'"),
])  # fmt: skip
def test_a_node_that_no_rule_fits(op, inputs, out, attributes, why):
    findings = validate(model(op, inputs, [out], **attributes))
    (finding,) = [one for one in findings if one.rule.startswith("traffic.no-")]
    assert why in finding.message


def test_an_operator_without_a_rule_is_told_once_it_matters():
    assert rules(model("DFT", [t(4, 8, 2, spec=P("x"))], [t(4, 8, 2)])) == ["traffic.no-rule"]
    assert rules(model("DFT", [t(4, 8, 2)], [t(4, 8, 2)])) == []


def _traced(operator):
    """The jaxpr of an operator's function, on one to three operands of a dtype that it takes."""
    for count in (1, 2, 3):
        for dtypes in (
            (jnp.float32,) * 3,
            (jnp.int32,) * 3,
            (bool,) * 3,
            (bool, *[jnp.float32] * 2),
        ):
            operands = [jax.ShapeDtypeStruct((2, 3), dtype) for dtype in dtypes[:count]]
            with contextlib.suppress(TypeError, ModelError):
                return jax.make_jaxpr(operator.function)(*operands)
    raise AssertionError(operator.op_type)


def test_elementwise_operators_are_elementwise_primitives():
    """The table of the checks and core's agree: each operator lowers to those primitives alone."""
    names = {*UNARY, *UNARY_EXTENSIONS, *BROADCAST, *BROADCAST_EXTENSIONS} - {"Cast", "BitShift"}
    operators = [found for name in sorted(names) if (found := find("", name, 22))]
    assert len(operators) > 50
    for operator in operators:
        primitives = {eqn.primitive.name for eqn in equations(_traced(operator))}
        assert primitives <= ELEMENTWISE | {*CALLS, "broadcast_in_dim"}, operator.op_type
