"""What is inferred from node to node, over stages, and where nothing is known."""

import onnx
from jax.sharding import PartitionSpec as P
from onnx import helper

from isoshard.onnx_bridge import Graph, validate
from isoshard.onnx_bridge.checking.semantics import Check
from tests.onnx_bridge.checking.broken import split, value
from tests.onnx_bridge.checking.one_node import placed, proto


def chain(*nodes, inputs, opset=20):
    """Nodes as (operator, inputs, output, stage, {tensor: spec proto})."""
    made = []
    for op, reads, makes, stage, specs in nodes:
        node = helper.make_node(op, reads, [makes], name=makes)
        entry = node.device_configurations.add(configuration_id="c")
        if stage is not None:
            entry.pipeline_stage = stage
        entry.sharding_spec.extend(specs)
        made.append(node)
    last = nodes[-1][2]
    values = [value(name, shape) for name, shape in inputs.items()]
    result = helper.make_tensor_value_info(last, 1, None)
    graph = helper.make_graph(made, "g", values, [result])
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, ir_version=11, opset_imports=opsets)
    model.configuration.add(name="c", num_devices=4)
    return model


def spec(name, shards, devices, axis=0):
    made = onnx.ShardingSpecProto(tensor_name=name, device=devices)
    split(made, axis, shards)
    return made


def run(model):
    check = Check(Graph(model), "c", 4, set())
    return check, [finding.rule for finding in check.run()]


MLP = {"x": [4, 8], "up": [8, 16], "down": [16, 8]}


def mlp(**specs):
    return chain(
        ("MatMul", ["x", "up"], "h", None, [proto(n, s, p) for n, s, p in specs["h"]]),
        ("Relu", ["h"], "r", None, []),
        ("MatMul", ["r", "down"], "y", None, [proto(n, s, p) for n, s, p in specs["y"]]),
        inputs=MLP,
    )


def test_a_missing_spec_is_the_producers():
    h = [("x", (4, 8), P("x")), ("up", (8, 16), P(None, "y"))]
    check, rules = run(mlp(h=h, y=[("down", (16, 8), P("y"))]))
    assert rules == ["traffic.collective"]
    assert check.results["r"] == placed((4, 16), P("x", "y"))
    assert check.results["y"] == placed((4, 8), P("x"))


def test_a_spec_of_its_own_is_followed_and_told():
    h = [("x", (4, 8), P("x")), ("up", (8, 16), P(None, "y"))]
    down = [("r", (4, 16), P("x")), ("down", (16, 8), P(None, "y"))]
    check, rules = run(mlp(h=h, y=down))
    assert rules == ["traffic.reshard"]
    assert check.results["y"] == placed((4, 8), P("x", "y"))


def test_what_follows_from_an_operator_without_rule_is_not_known():
    model = chain(
        ("Identity", ["x"], "a", None, [proto("x", (4, 8), P("x"))]),
        ("Trilu", ["a"], "b", None, []),
        ("Add", ["b", "z"], "y", None, [proto("z", (4, 8), P(None, "y"))]),
        inputs={"x": [4, 8], "z": [4, 8]},
    )
    check, rules = run(model)
    assert rules == ["traffic.no-rule"]
    assert check.results["y"] is None


def test_what_arrives_whole_can_be_cut_where_it_is():
    model = chain(
        ("Identity", ["x"], "a", None, [proto("x", (4, 8), P())]),
        ("Add", ["a", "z"], "y", None, [proto("z", (4, 8), P("x"))]),
        inputs={"x": [4, 8], "z": [4, 8]},
    )
    check, rules = run(model)
    assert rules == ["formalism.unsharded-input"]
    assert check.results["y"] == placed((4, 8), P("x"))


def test_a_weight_that_two_nodes_want_differently():
    model = chain(
        ("MatMul", ["x", "w"], "a", None, [proto("w", (8, 8), P(None, "x"))]),
        ("MatMul", ["x", "w"], "b", None, [proto("w", (8, 8), P(None, "y"))]),
        inputs={"x": [4, 8], "w": [8, 8]},
    )
    (finding,) = validate(model)
    assert (finding.rule, finding.node, finding.tensor) == ("traffic.reshard", "b", "w")


class TestStages:
    def two(self, first, second, later=None):
        return chain(
            ("Relu", ["x"], "a", first, [spec("x", 2, [0, 1])]),
            ("Add", ["a", "z"], "y", second, [later or spec("z", 2, [2, 3])]),
            inputs={"x": [4, 8], "z": [4, 8]},
        )

    def test_a_value_keeps_its_blocks_on_the_next_stages_devices(self):
        check, rules = run(self.two(0, 1))
        assert rules == []
        assert str(check.results["y"]) == "2 x 1 blocks: (0, 0) on 2; (1, 0) on 3"

    def test_going_back_is_an_error(self):
        (finding,) = [one for one in validate(self.two(1, 0)) if one.severity == "error"][:1]
        assert (finding.rule, finding.node, finding.tensor) == ("structure.stage-order", "y", "a")
