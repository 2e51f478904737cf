"""Compiled models: gradients, stages, inputs, and values that are too large."""

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import isoshard as iso
from benchmarks import collectives
from isoshard import P
from isoshard.core.errors import UnevenError
from isoshard.onnx_bridge import ModelError, annotate, compile

FLOAT = TensorProto.FLOAT


def model_of(nodes, inputs, outputs, tensors=()):
    """A model of float values; inputs and outputs by name and shape."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in dict(tensors).items()],
    )
    return helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])


def node(op_type, inputs, outputs, **attributes):
    return helper.make_node(op_type, inputs, outputs, name=outputs[0], **attributes)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def weights(rng):
    return {k: rng.standard_normal((8, 8)).astype(np.float32) for k in ("a", "b")}


@pytest.fixture
def two_stages(weights):
    """x @ a, relu | @ b + (x @ a) @ a: the weight `a` is read in both stages."""
    nodes = [
        node("MatMul", ["x", "a"], ["h"]),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "b"], ["u"]),
        node("MatMul", ["h", "a"], ["v"]),
        node("Add", ["u", "v"], ["y"]),
    ]
    return model_of(nodes, {"x": [4, 8]}, {"y": [4, 8]}, weights)


def reference(weights, x):
    h = x @ weights["a"]
    return np.maximum(h, 0) @ weights["b"] + h @ weights["a"]


STAGES = {"h": 0, "r": 0, "u": 1, "v": 1}


class TestStages:
    def test_each_runs_on_its_own_devices(self, two_stages, weights, rng):
        mesh = iso.make_mesh((2, 2), ("dp", "tp"))
        specs = {"x": P("dp"), "a": P(None, "tp"), "b": P("tp")}
        run = compile(annotate(two_stages, mesh, specs, STAGES))
        x = rng.standard_normal((4, 8)).astype(np.float32)
        np.testing.assert_allclose(run(x), reference(weights, x), rtol=1e-5, atol=1e-5)
        assert [sorted(stage) for stage in run.parameters] == [["a"], ["a", "b"]]
        ids = [{d.id for a in stage.values() for d in a.devices()} for stage in run.parameters]
        assert ids == [set(range(4)), set(range(4, 8))]

    def test_gradients_flow_through_both(self, two_stages, weights, rng):
        mesh = iso.make_mesh((2, 2), ("dp", "tp"))
        run = compile(annotate(two_stages, mesh, {"a": P(None, "tp"), "b": P("tp")}, STAGES))
        x = rng.standard_normal((4, 8)).astype(np.float32)

        def wanted(tensors, x):
            h = x @ tensors["a"]
            return (jax.nn.relu(h) @ tensors["b"] + h @ tensors["a"]).sum()

        first, second = jax.grad(lambda p: run.apply(p, x).sum())(run.parameters)
        grads = jax.jit(jax.grad(wanted, argnums=(0, 1)))(weights, x)
        of_a = np.asarray(first["a"]) + np.asarray(second["a"])
        np.testing.assert_allclose(of_a, grads[0]["a"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second["b"], grads[0]["b"], rtol=1e-4, atol=1e-4)
        by_input = jax.grad(lambda x: run(x).sum())(x)
        np.testing.assert_allclose(by_input, grads[1], rtol=1e-4, atol=1e-4)
        assert second["b"].sharding.is_equivalent_to(run.parameters[1]["b"].sharding, 2)

    def test_a_value_of_which_nothing_is_said_goes_over_as_it_was_made(self, two_stages, counted):
        mesh = iso.make_mesh((4,), ("dp",))
        run = compile(annotate(two_stages, mesh, {"x": P("dp")}, STAGES))
        second = run.lowered()[1]
        entering = second.in_avals[0][2]
        assert {name: aval.shape for name, aval in entering.items()} == {"h": (4, 8), "r": (4, 8)}
        assert all("dp" in str(one) for one in jax.tree.leaves(run._routes.of(_zeros(run))[1]))
        assert run(np.zeros((4, 8), np.float32)).sharding.spec == P("dp")
        assert [collectives.summarize(text) for text in run.hlo()] == [{}, {}]


def _zeros(run):
    return {"x": np.zeros((4, 8), np.float32)}


class TestUnspecified:
    def test_inferred_values_lie_as_the_formalism_says(self, two_stages, weights, rng):
        specs = {"x": P(), "a": P(None, "tp"), "b": P("tp")}
        mesh = iso.make_mesh((8,), ("tp",))
        run = compile(annotate(two_stages, mesh, specs), unspecified="infer")
        said = {name: one.spec for (_, name), one in run.layout.shardings.items()}
        assert said["h"] == P(None, "tp") and said["r"] == P(None, "tp") and said["u"] == P()
        x = rng.standard_normal((4, 8)).astype(np.float32)
        np.testing.assert_allclose(run(x), reference(weights, x), rtol=1e-5, atol=1e-5)


class TestTensors:
    def test_large_ones_that_are_no_weights_are_arguments_but_no_parameters(self, rng):
        mask = rng.standard_normal((32, 32)).astype(np.float32)
        weight = rng.standard_normal((32, 32)).astype(np.float32)
        model = model_of(
            [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "mask"], ["y"])],
            {"x": [32, 32]},
            {"y": [32, 32]},
            {"w": weight, "mask": mask},
        )
        from isoshard.onnx_bridge.reading.parameter_record import Origin, write_parameters

        write_parameters(model, {"w": Origin("layer.w", (0, 1))})
        run = compile(annotate(model, iso.make_mesh((8,), ("x",)), {"w": P("x")}))
        assert list(run.parameters[0]) == ["w"]
        assert run.origins["w"].parameter == "layer.w"
        x = np.eye(32, dtype=np.float32)
        np.testing.assert_allclose(run(x), weight + mask, rtol=1e-6)
        assert len(jax.tree.leaves(run.lowered()[0].in_avals)) == 3

    def test_an_output_that_no_node_makes_is_refused(self, weights):
        nodes = [node("MatMul", ["x", "a"], ["h"])]
        model = model_of(nodes, {"x": [4, 8]}, {"h": [4, 8], "b": [8, 8]}, weights)
        with pytest.raises(ModelError, match="'b': an output that no node makes"):
            compile(annotate(model, iso.make_mesh((8,), ("x",)), {"a": P("x")}))


class TestInputs:
    @pytest.fixture
    def run(self, weights):
        model = model_of(
            [node("MatMul", ["x", "a"], ["h"]), node("Add", ["h", "z"], ["y"])],
            {"x": ["batch", 8], "z": ["batch", 8]},
            {"y": ["batch", 8]},
            weights,
        )
        specs = {"x": P("dp"), "a": None, "z": P("dp")}
        return compile(annotate(model, iso.make_mesh((8,), ("dp",)), specs))

    def test_by_position_by_name_and_on_devices_already(self, run):
        x, z = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
        first = run(x, z)
        np.testing.assert_array_equal(first, run(z=z, x=x))
        placed = [jax.device_put(a, run.input_shardings[n]) for n, a in (("x", x), ("z", z))]
        np.testing.assert_array_equal(first, run(*placed))
        assert first.sharding.spec == P("dp")

    def test_all_faults_are_told(self, run):
        x = np.ones((8, 8))
        with pytest.raises(ModelError, match=r"x is float64, not float32; convert it") as caught:
            run(x, q=x)
        assert "takes x: float32[batch, 8], z: float32[batch, 8]" in str(caught.value)
        assert "there is no input 'q'" in str(caught.value)
        assert "z is missing" in str(caught.value)

    def test_sizes_agree(self, run):
        x = np.ones((8, 8), np.float32)
        with pytest.raises(ModelError, match=r"z: axis 0 has size 16, not 8 as in x \(batch\)"):
            run(x, np.ones((16, 8), np.float32))
        with pytest.raises(ModelError, match=r"z: axis 1 has size 4, not 8"):
            run(x, x[:, :4])
        with pytest.raises(ModelError, match=r"z has shape \(8,\), which is not of rank 2"):
            run(x, x[0])
        with pytest.raises(ModelError, match=r"3 were passed by position(.|\n)*x is passed twice"):
            run(x, x, x, x=x)

    def test_a_batch_that_does_not_split(self, run):
        x = np.ones((6, 8), np.float32)
        with pytest.raises(UnevenError, match=r"x: shape \(6, 8\) does not split evenly"):
            run(x, x)

    def test_open_shapes_are_asked_for(self, run):
        with pytest.raises(ModelError, match="x is missing"):
            run.lowered()
        shape = jax.ShapeDtypeStruct((8, 8), np.float32)
        assert len(run.hlo(shape, shape)) == 1


class TestSizes:
    def huge(self, sizes, **tensors):
        """Broadcasts one number to the sizes, and adds it up."""
        nodes = [
            node("Expand", ["x", "sizes"], ["large"]),
            node("ReduceSum", ["large"], ["y"], keepdims=0),
        ]
        held = {"sizes": np.array(sizes, np.int64), **tensors}
        model = model_of(nodes, {"x": ["one"]}, {"y": []}, held)
        return annotate(model, iso.make_mesh((8,), ("x",)), {"x": None})

    def test_a_gigantic_value_is_refused_before_it_is_made(self):
        run = compile(self.huge([1 << 30, 1 << 20]))
        with pytest.raises(ModelError, match=r"node 'large' \(Expand\): value 'large' of shape "):
            run(np.ones(1, np.float32))

    def test_with_known_shapes_when_it_is_compiled(self):
        model = self.huge([1 << 30, 1 << 20])
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        with pytest.raises(ModelError, match=r"takes 4096\.0 TiB, more than 64\.0 GiB; if that"):
            compile(model)

    def test_the_limit_can_be_set(self):
        one = np.ones(1, np.float32)
        assert compile(self.huge([64, 64]))(one) == 4096
        with pytest.raises(ModelError, match=r"more than 1\.0 KiB"):
            compile(self.huge([64, 64]), max_bytes=1024)(one)

    def test_inputs_count_too(self):
        model = self.huge([2])
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1 << 50
        with pytest.raises(ModelError, match="value 'x' of shape"):
            compile(model)


def test_operators_that_cannot_run_are_told_when_it_is_compiled(weights):
    nodes = [node("MatMul", ["x", "a"], ["h"]), node("Loop", ["", "", "h"], ["y"])]
    nodes[1].attribute.append(helper.make_attribute("body", helper.make_graph([], "b", [], [])))
    model = model_of(nodes, {"x": [4, 8]}, {"y": [4, 8]}, weights)
    with pytest.raises(ModelError, match=r"Loop-20 \(node 'y'\)"):
        compile(annotate(model, iso.make_mesh((8,), ("x",)), {"a": P("x")}))
