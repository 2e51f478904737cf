"""The worked examples and rules of ONNX proposal 0007, as written there."""

import onnx
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.onnx_bridge import Graph, validate
from isoshard.onnx_bridge.checking.operator_rules import elementwise_factors, rule_of
from isoshard.onnx_bridge.checking.semantics import Check
from tests.onnx_bridge.checking.broken import group, split, value
from tests.onnx_bridge.checking.one_node import constant, inferred, model, placed, t


def add(shapes, specs, op="Add", devices=4):
    """A node of two inputs with literal specs: (name, devices, groups, {axis: shards})."""
    names = [*("A", "B")[: len(shapes) - 1], "C"]
    node = onnx.helper.make_node(op, names[:-1], ["C"], name="node")
    entry = node.device_configurations.add(configuration_id="c")
    for name, listed, groups, splits in specs:
        spec = entry.sharding_spec.add(tensor_name=name, device=listed)
        for key, members in groups.items():
            group(spec, key, members)
        for axis, shards in splits.items():
            split(spec, axis, shards)
    values = [value(name, shape) for name, shape in zip(names, shapes, strict=True)]
    graph = onnx.helper.make_graph([node], "g", values[:-1], values[-1:])
    made = onnx.helper.make_model(graph, ir_version=11)
    made.configuration.add(name="c", num_devices=devices)
    return made


class TestAdd:
    shape = (32, 1024)

    def test_axis_0_against_axis_1_makes_no_sense(self):
        specs = [("A", [0, 1], {}, {0: 2}), ("B", [0, 1], {}, {1: 2})]
        findings = validate(add([self.shape] * 3, specs))
        assert {one.rule for one in findings} == {"formalism.shards"}
        assert "in 2 shards, and the axis of input 0 that goes with it in 1" in str(findings[-1])

    def test_the_output_may_be_laid_out_anew(self):
        specs = [("A", [0, 1], {}, {0: 2}), ("B", [0, 1], {}, {0: 2}), ("C", [0, 1], {}, {1: 2})]
        (finding,) = validate(add([self.shape] * 3, specs))
        assert (finding.rule, finding.severity) == ("traffic.reshard", "info")
        assert "computed as 2 x 1 blocks" in finding.message
        assert "delivered as 1 x 2 blocks" in finding.message

    def test_the_same_split_on_devices_in_another_order_is_refused(self):
        specs = [("A", [0, 1], {}, {0: 2}), ("B", [1, 0], {}, {0: 2})]
        (finding,) = validate(add([self.shape] * 3, specs))
        assert finding.rule == "formalism.devices"
        assert "block (0, 0) of input 0 is on 0; block (0, 0) of input 1 is on 1" in finding.message

    def test_the_same_split_along_another_mesh_axis_is_refused(self):
        inputs = [t(4, 8, spec=P("x")), t(4, 8, spec=P("y"))]  # devices 0 and 3 could go on
        (finding,) = validate(model("Add", inputs, [t(4, 8)]))
        assert finding.rule == "formalism.devices"
        assert "device 1 has shards that do not go together, as do 1 more" in finding.message


class TestComposing:
    """`[M, 1] + [1, N]`, the example with the picture."""

    shapes = ([6, 1], [1, 8], [6, 8])
    rows = ("A", [-1, -2], {-1: [0, 1], -2: [2, 3]}, {0: 2})
    columns = ("B", [-1, -2], {-1: [0, 2], -2: [1, 3]}, {1: 2})
    blocks = ("C", [0, 1, 2, 3], {}, {0: 2, 1: 2})

    def test_the_result_has_one_block_per_device(self):
        made = add(self.shapes, [self.rows, self.columns])
        check = Check(Graph(made), "c", 4, set())
        assert check.run() == []
        assert str(check.results["C"]) == (
            "2 x 2 blocks: (0, 0) on 0; (0, 1) on 1; (1, 0) on 2; (1, 1) on 3"
        )
        assert validate(add(self.shapes, [self.rows, self.columns, self.blocks])) == []

    def test_an_empty_intersection_is_refused(self):
        columns = ("B", [-1, -2], {-1: [0, 1], -2: [2, 3]}, {1: 2})
        (finding,) = validate(add(self.shapes, [self.rows, columns]))
        assert finding.rule == "formalism.devices"
        assert "block (0, 0) of input 0 is on 0, 1; block (0, 1) of input 1 is on 2, 3" in str(
            finding
        )

    def test_a_broadcast_axis_may_not_be_split(self):
        specs = [("A", [0, 1], {}, {1: 2}), ("B", [-1], {-1: [0, 1]}, {})]
        found = [one for one in validate(add(self.shapes, specs)) if one.severity == "error"]
        assert [(one.rule, one.tensor, one.axis) for one in found] == [
            ("formalism.broadcast", "A", 1)
        ]


class TestReductions:
    @pytest.mark.parametrize(("keep", "shape"), [(0, (4,)), (1, (4, 1))])
    def test_other_axes_inherit(self, keep, shape):
        inputs = [t(4, 8, spec=P("x")), constant(1)]
        (out,), found = inferred(model("ReduceSum", inputs, [t(*shape)], keepdims=keep))
        assert (out, found) == (placed(shape, P("x")), [])

    def test_a_reduced_axis_is_summed_across_devices_that_all_get_the_result(self):
        inputs = [t(4, 8, spec=P(None, "y"))]
        (out,), found = inferred(model("ReduceMax", inputs, [t(4)], keepdims=0, axes=[1], opset=13))
        assert (out, found) == (placed((4,), P()), ["traffic.collective"])


class TestProducts:
    def product(self, a, b, op="MatMul", shapes=((4, 8), (8, 6)), **attributes):
        inputs = [t(*shapes[0], spec=a), t(*shapes[1], spec=b)]
        (out,), found = inferred(model(op, inputs, [t(4, 6)], **attributes))
        return out, found

    def test_m_from_the_first_and_n_from_the_second(self):
        assert self.product(P("x"), P(None, "y")) == (placed((4, 6), P("x", "y")), [])

    def test_k_alike_is_a_sum_across_devices(self):
        out, found = self.product(P("x", "y"), P("y"))
        assert (out, found) == (placed((4, 6), P("x")), ["traffic.collective"])

    @pytest.mark.parametrize("b", [P(), P(None, "y"), P(("x", "y"))])
    def test_k_split_otherwise_is_refused(self, b):
        assert self.product(P(None, "x"), b) == (None, ["formalism.shards"])

    def test_k_split_along_another_mesh_axis_is_refused(self):
        (out, found) = self.product(P("y", "x"), P(("x",), "y"))  # m and n on the same devices
        assert (out, found) == (None, ["formalism.devices"])

    def test_gemm_with_a_transposed_side(self):
        found = self.product(P("x"), P("y"), "Gemm", ((4, 8), (6, 8)), transB=1)
        assert found == (placed((4, 6), P("x", "y")), [])

    def test_the_bias_of_gemm_goes_with_the_columns(self):
        inputs = [t(4, 8, spec=P("x")), t(8, 6, spec=P(None, "y"))]
        good = model("Gemm", [*inputs, t(6, spec=P("y"))], [t(4, 6)])
        bad = model("Gemm", [*inputs, t(6, spec=P("x"))], [t(4, 6)])
        assert inferred(good) == ([placed((4, 6), P("x", "y"))], [])
        assert inferred(bad) == ([None], ["formalism.devices"])

    def test_the_letters_of_einsum(self):
        inputs = [t(2, 4, 8, spec=P("x")), t(2, 6, 8, spec=P("x", "y"))]
        out, found = inferred(model("Einsum", inputs, [t(2, 4, 6)], equation="bqd,bkd->bqk"))
        assert (out, found) == ([placed((2, 4, 6), P("x", None, "y"))], [])

    def test_batches_are_broadcast(self):
        inputs = [t(2, 4, 8, spec=P("x")), t(8, 6, spec=P(None, "y"))]
        out, found = inferred(model("MatMul", inputs, [t(2, 4, 6)]))
        assert (out, found) == ([placed((2, 4, 6), P("x", None, "y"))], [])

    def test_quantised(self):
        inputs = [t(4, 8, spec=P("x")), t(), t(), t(8, 6, spec=P(None, "y")), t(), t(), t(), t()]
        out, found = inferred(model("QLinearMatMul", inputs, [t(4, 6)]))
        assert (out, found) == ([placed((4, 6), P("x", "y"))], [])


LISTED = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Cast Ceil Cos Cosh Dropout Erf Exp Floor Identity IsInf "
    "IsNaN Log Max Min Neg Not Reciprocal Round Sigmoid Sign Sin Sinh Tan Tanh ConstantOfShape Add "
    "And BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Equal Greater Less Mod Mul Or Pow Sub "
    "Sum Where Xor MatMul Gemm MatMulInteger QLinearMatMul Einsum"
).split()


def test_every_operator_that_the_proposal_lists_has_a_rule():
    assert [op for op in LISTED if rule_of(op, "") is None] == []
    ours = {*elementwise_factors.UNARY_EXTENSIONS, *elementwise_factors.BROADCAST_EXTENSIONS}
    assert not ours & set(LISTED)
    assert {*elementwise_factors.UNARY, *elementwise_factors.BROADCAST} <= set(LISTED)
