"""Graphs: known values, constraints, functions, branches, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.executor import evaluate
from isoshard.onnx_bridge.reading import Graph

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4, 6)).astype(np.float32)


def model(nodes, inputs, outputs, opset=18, functions=(), more=()):
    """A model with float inputs of unknown shape, whatever their names."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inputs]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, made)
    imports = [helper.make_opsetid("", opset), *more]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def run(made: onnx.ModelProto, **values):
    graph = Graph(made)
    known = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and v.dtype != np.float32}
    rest = {k: v for k, v in values.items() if k not in known}

    def program(rest):
        found = evaluate(graph.nodes, {**rest, **known}, graph.opsets, functions=made.functions)
        return [found[name] for name in graph.outputs]

    return jax.jit(program)(rest)


def test_shapes_computed_from_shapes_are_known():
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        helper.make_node("Gather", ["sizes", "one"], ["width"]),
        helper.make_node("Constant", [], ["two"], value_int=2),
        helper.make_node("Div", ["width", "two"], ["half"]),
        helper.make_node("Unsqueeze", ["half", "axis"], ["half1"]),
        helper.make_node("Constant", [], ["rest"], value_ints=[-1, 2]),
        helper.make_node("Concat", ["rest", "half1"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    (y,) = run(model(nodes, ["x"], ["y"]), x=X)
    np.testing.assert_array_equal(y, X.reshape(-1, 2, 3))


def test_large_known_values_go_to_the_device():
    nodes = [
        helper.make_node("Constant", [], ["shape"], value_ints=[300, 400]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Exp", ["zeros"], ["y"]),
        helper.make_node("Constant", [], ["wide"], value_ints=[1 << 20, 1 << 20]),
        helper.make_node("Expand", ["x", "wide"], ["vast"]),
        helper.make_node("Shape", ["vast"], ["sizes"]),
    ]
    graph = Graph(model(nodes, ["x"], ["y", "vast"]))
    known = np.ones((1,), np.int64)
    found = jax.eval_shape(lambda: evaluate(graph.nodes, {"x": known}, graph.opsets)["vast"])
    assert found.shape == (1 << 20, 1 << 20)  # a number, no memory


def test_constraints_see_each_input_and_output():
    nodes = [
        helper.make_node("Relu", ["x"], ["y"], name="relu"),
        helper.make_node("Constant", [], ["flat"], value_ints=[-1]),
        helper.make_node("Reshape", ["y", "flat"], ["z"], name="reshape"),
    ]
    graph, seen = Graph(model(nodes, ["x"], ["z"])), []

    def constrain(node, tensor, array):
        seen.append((node.name, tensor))
        return array + 1 if (node.name, tensor) == ("relu", "x") else array

    found = evaluate(graph.nodes, {"x": jnp.zeros(2)}, graph.opsets, constrain)
    np.testing.assert_array_equal(found["z"], [1, 1])
    assert [pair for pair in seen if pair[0] in ("relu", "reshape")] == [
        ("relu", "x"), ("relu", "y"), ("reshape", "y"), ("reshape", "z"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "attributes", "inputs"),
    [
        ("MeanVarianceNormalization", 13, {"axes": [0]}, {"x": X}),
        ("CenterCropPad", 18, {"axes": [1]}, {"x": X, "s": np.array([4])}),
        (
            "SoftmaxCrossEntropyLoss",
            13,
            {"reduction": "sum"},
            {"x": X, "t": np.array([0, 5, 2, 2])},
        ),
        ("HannWindow", 17, {"periodic": 0}, {"n": np.array(5)}),
        ("AffineGrid", 20, {}, {"x": X.reshape(4, 2, 3)[:2], "s": np.array([2, 1, 2, 3])}),
    ],
    ids=lambda value: str(value)[:25],
)
def test_operators_without_an_entry_are_what_onnx_says_they_are_made_of(
    op, opset, attributes, inputs
):
    node = helper.make_node(op, list(inputs), ["y"], **attributes)
    found = run(model([node], list(inputs), ["y"], opset), **inputs)
    typed = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in inputs.items()
    ]
    graph = helper.make_graph([node], "g", typed, [helper.make_empty_tensor_value_info("y")])
    oracle = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    wanted = ReferenceEvaluator(oracle).run(None, inputs)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)


def scaled(domain="mine"):
    """A function y = x * by + shift, with an attribute, a default and an optional input."""
    by = helper.make_node("Constant", [], ["by"])
    by.attribute.append(helper.make_attribute("value_float", 0.0))
    by.attribute[0].ClearField("f")
    by.attribute[0].ref_attr_name = "by"
    nodes = [
        by,
        helper.make_node("Mul", ["x", "by"], ["scaled"]),
        helper.make_node("Clip", ["scaled", "low"], ["y"]),
    ]
    return helper.make_function(
        domain, "Scaled", ["x", "low"], ["y"], nodes, [helper.make_opsetid("", 18)], [],
        [helper.make_attribute("by", 3.0)],
    )  # fmt: skip


@pytest.mark.parametrize(("attributes", "factor"), [({}, 3.0), ({"by": 0.5}, 0.5)])
def test_a_models_own_function_runs_with_the_calls_attributes(attributes, factor):
    node = helper.make_node("Scaled", ["x"], ["y"], domain="mine", **attributes)
    made = model([node], ["x"], ["y"], 18, [scaled()], [helper.make_opsetid("mine", 1)])
    (y,) = run(made, x=X)
    np.testing.assert_allclose(y, X * factor, rtol=1e-6)


def branches(condition="c"):
    """y = relu(x) if c else x + w, w an initializer of the branch."""
    w = helper.make_tensor("w", TensorProto.FLOAT, [1], [2.0])
    out = [helper.make_empty_tensor_value_info("out")]
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["out"])], "t", [], out)
    other = helper.make_graph([helper.make_node("Add", ["x", "w"], ["out"])], "e", [], out, [w])
    return helper.make_node("If", [condition], ["y"], then_branch=then, else_branch=other)


@pytest.mark.parametrize("condition", [True, False])
def test_a_known_condition_names_the_branch(condition):
    made = model([branches()], ["x", "c"], ["y"])
    (y,) = run(made, x=X, c=np.array(condition))
    np.testing.assert_array_equal(y, np.maximum(X, 0) if condition else X + 2)


def test_an_unknown_condition_is_refused():
    nodes = [helper.make_node("Cast", ["x"], ["c"], to=TensorProto.BOOL), branches()]
    with pytest.raises(ModelError, match=r"node 'If_1' \(If\): its condition 'c' is computed from"):
        run(model(nodes, ["x"], ["y"]), x=X[:1, :1])


def test_all_unknown_operators_are_named_at_once():
    nodes = [
        helper.make_node("Frob", ["x"], ["a"], name="one", domain="acme"),
        helper.make_node("Frob", ["a"], ["b"], name="two", domain="acme"),
        helper.make_node("Unique", ["b"], ["d"], name="three"),
        helper.make_node("Bernoulli", ["d"], ["y"], name="four"),
    ]
    made = model(nodes, ["x"], ["y"], 18, (), [helper.make_opsetid("acme", 1)])
    message = (
        r"2 operators have neither .*: Unique-18 \(node 'three'\); "
        r"acme\.Frob-1 \(2 nodes, first 'one'\)\. Export the model without them, or teach"
    )
    with pytest.raises(ModelError, match=message):
        run(made, x=X)


def test_a_function_that_calls_itself_is_refused():
    again = helper.make_node("Round", ["x"], ["y"], domain="mine")
    function = helper.make_function(
        "mine", "Round", ["x"], ["y"], [again], [helper.make_opsetid("mine", 1)]
    )
    node = helper.make_node("Round", ["x"], ["y"], domain="mine")
    made = model([node], ["x"], ["y"], 18, [function], [helper.make_opsetid("mine", 1)])
    with pytest.raises(ModelError, match="function 'Round' calls itself, or is nested"):
        run(made, x=X)


def test_functions_that_double_and_double_again_are_refused(monkeypatch):
    """A file of a few lines that stands for two to the power of 24 nodes."""
    imports = [helper.make_opsetid("mine", 1), helper.make_opsetid("", 18)]
    functions = []
    for level in range(24):
        op, domain = (f"F{level - 1}", "mine") if level else ("Relu", "")
        nodes = [
            helper.make_node(op, ["x"], ["a"], domain=domain),
            helper.make_node(op, ["a"], ["y"], domain=domain),
        ]
        functions.append(helper.make_function("mine", f"F{level}", ["x"], ["y"], nodes, imports))
    node = helper.make_node("F23", ["x"], ["y"], domain="mine")
    made = model([node], ["x"], ["y"], 18, functions, imports[:1])
    monkeypatch.setattr("isoshard.onnx_bridge.executor.functions._MOST_NODES", 500)
    with pytest.raises(ModelError, match="its functions make more than 500 nodes"):
        run(made, x=X)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("Relu", ["x"], ["y"], speed=2), r"attributes \['speed'\] are not among"),
        (helper.make_node("Relu", ["x", "x"], ["y"]), "it has 2 inputs, and at most 1 are known"),
        (helper.make_node("Relu", ["x"], ["y", "z"]), r"does not compute \['z'\]"),
        (helper.make_node("Add", ["x"], ["y"]), "missing 1 required positional argument"),
        (helper.make_node("MatMul", ["x", "x"], ["y"]), r"node 'MatMul_0' \(MatMul\): "),
    ],
    ids=["attribute", "inputs", "outputs", "too few", "shapes"],
)
def test_a_node_that_makes_no_sense_is_refused_by_name(node, message):
    with pytest.raises(ModelError, match=message):
        run(model([node], ["x"], ["y"]), x=X)


def test_an_unknown_operator_inside_a_function_is_named_with_it():
    inner = helper.make_node("Loop", ["", "c"], ["y"], body=helper.make_graph([], "b", [], []))
    function = helper.make_function(
        "mine", "Outer", ["c"], ["y"], [inner], [helper.make_opsetid("", 18)]
    )
    node = helper.make_node("Outer", ["x"], ["y"], domain="mine", name="n")
    made = model([node], ["x"], ["y"], 18, [function], [helper.make_opsetid("mine", 1)])
    with pytest.raises(ModelError, match=r"Loop-18 in Outer \(node 'n'\)"):
        run(made, x=X)


def test_an_opset_from_the_future_is_refused():
    with pytest.raises(ModelError, match="opset 999, and the installed onnx has"):
        run(model([helper.make_node("Relu", ["x"], ["y"])], ["x"], ["y"], 999), x=X)
