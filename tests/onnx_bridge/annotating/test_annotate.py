"""`annotate`: where specs go, what stays, and what does not fit."""

import onnx
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import AnnotationError, annotate, layout
from isoshard.onnx_bridge.reading.annotations import node_annotations
from isoshard.onnx_bridge.reading.parameter_record import Origin, write_parameters
from tests.onnx_bridge.models import FLOAT, mlp


@pytest.fixture
def mesh():
    return make_mesh((2, 2), ("data", "model"))


def said(model, config="default"):
    """Node name -> names of annotated tensors."""
    found = node_annotations(model, config)
    return {model.graph.node[at].name: list(one.specs) for at, one in found.items()}


def test_the_model_given_stays_as_it_is(mesh):
    model = mlp()
    before = model.SerializeToString()
    annotate(model, mesh, {"w0": P("model")})
    assert model.SerializeToString() == before


def test_weights_and_inputs_at_their_readers_results_at_their_makers(mesh):
    model = mlp()
    model.graph.node[3].input[0] = "x"
    done = annotate(model, mesh, {"x": P("data"), "w0": P("model"), "h0": None, "y1": P("data")})
    assert said(done) == {"up0": ["x", "w0", "h0"], "up1": ["x"], "relu1": ["y1"]}
    onnx.checker.check_model(done, full_check=True)


def test_a_pattern_and_the_first_that_matches(mesh):
    done = annotate(mlp(), mesh, {"w1": None, "w*": P("model"), "re:y[0-9]": P("data")})
    found = layout(done)
    assert found.parameters["w0"][0].spec == P("model")
    assert found.parameters["w1"][0].spec == P()
    assert found.sharding(2, "y0").spec == P("data")


@pytest.mark.parametrize("spelling", [
    P("model", None),
    ("model",),
    (1, None),
    "{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}",
])  # fmt: skip
def test_any_spelling_of_a_spec(mesh, spelling):
    assert layout(annotate(mlp(), mesh, {"w0": spelling})).parameters["w0"][0].spec == P("model")


def test_one_node_alone(mesh):
    """What a consumer wants may differ from what the producer gives."""
    done = annotate(mlp(), mesh, {"y0": P("data"), ("up1", "y0"): P(None, "model")})
    found = layout(done)
    assert found.sharding(2, "y0").spec == P("data")
    assert found.sharding(3, "y0").spec == P(None, "model")


def test_the_name_of_a_weight_that_an_exporter_renamed_and_turned(mesh):
    model = mlp()
    write_parameters(model, {"w0": Origin("net.0.weight", (1, 0))})
    done = annotate(model, mesh, {"net.*.weight": P("model")})
    assert layout(done).parameters["w0"][0].spec == P(None, "model")
    with pytest.raises(AnnotationError, match=r"'net.0.weight', whose axes are in another order"):
        annotate(model, mesh, {"net.0.weight": "{replicated}"})


def test_values_of_unknown_rank(mesh):
    model = mlp()
    model.graph.node[0].op_type, model.graph.node[0].domain = "Mystery", "com.example"
    model.opset_import.add(domain="com.example", version=1)
    assert said(annotate(model, mesh, {"h0": P("data")})) == {"up0": ["h0"]}
    with pytest.raises(AnnotationError, match="node 'up0', tensor 'h0': its rank is unknown"):
        annotate(model, mesh, {"h0": NamedSharding(mesh, P("data"))})


def test_several_configurations_live_side_by_side(mesh):
    done = annotate(mlp(), mesh, {"w0": P("model")}, config="tp")
    done = annotate(done, make_mesh((8,), ("data",)), {"x": P("data")}, config="dp")
    assert said(done, "tp") == {"up0": ["w0"]} and said(done, "dp") == {"up0": ["x"]}
    assert [one.num_devices for one in done.configuration] == [4, 8]
    again = annotate(done, mesh, {"w1": P("data")}, config="tp")
    assert said(again, "tp") == {"up1": ["w1"]} and said(again, "dp") == {"up0": ["x"]}
    assert layout(again, config="dp").inputs["x"].spec == P("data")


@pytest.mark.parametrize(("before", "after"), [(8, 11), (11, 11), (12, 12), (13, 13)])
def test_the_version_of_the_format(mesh, before, after):
    model = mlp()
    model.ir_version = before
    assert annotate(model, mesh, {}).ir_version == after


def test_every_spec_that_does_not_fit_is_named(mesh):
    specs = {"w0": P("modle"), "b1": P(None, "data"), "x": P("data", "data")}
    with pytest.raises(AnnotationError, match="3 annotations do not fit") as caught:
        annotate(mlp(), mesh, specs)
    told = str(caught.value)
    assert "node 'up0', tensor 'w0': the layout: spec P('modle',) does not fit" in told
    assert "node 'bias1', tensor 'b1'" in told and "2 entries for a tensor of rank 1" in told
    assert "node 'up0', tensor 'x'" in told and "used 2 times" in told


@pytest.mark.parametrize(("specs", "match"), [
    ({"w9": None, "v*": None}, r"no value or parameter is called 'w9'; there is 'x', 'w0'.*'v\*'"),
    ({("up0", "w1"): None}, r"\('up0', 'w1'\) is no pair of a node and a value"),
    ({"lonely": None}, "no node reads 'lonely'"),
    ({"re:(": None}, "is not a regular expression"),
    ({3: None}, "3 is not a string"),
])  # fmt: skip
def test_names_that_fit_nothing(mesh, specs, match):
    model = mlp()
    model.graph.initializer.append(onnx.helper.make_tensor("lonely", FLOAT, [1], [0.0]))
    with pytest.raises(ValueError, match=match):
        annotate(model, mesh, specs)


def test_a_version_that_onnxruntime_does_not_read(mesh):
    model = mlp()
    model.ir_version = 14
    with pytest.warns(UserWarning, match="IR version 14; ONNX Runtime 1.31 reads up to 13"):
        assert annotate(model, mesh, {}).ir_version == 14


def test_an_uneven_axis_is_named(mesh):
    with pytest.raises(AnnotationError, match=r"node 'up0', tensor 'x', axis 0: its size 3") as err:
        annotate(mlp(batch=3), mesh, {"x": P("data")})
    assert (err.value.node, err.value.tensor, err.value.axis) == ("up0", "x", 0)
