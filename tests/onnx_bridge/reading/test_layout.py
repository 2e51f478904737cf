"""Layouts of whole models: meshes of stages, parameters, inputs, notes, errors."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import DeviceError
from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import AnnotationError, annotate, layout
from tests.onnx_bridge.models import mlp

MESH = ((2, 2), ("data", "model"))
SPECS = {"x": P("data"), "w0": P(None, "model"), "w1": P("model"), "y*": P("data")}


def unnamed(model):
    """The model without what we keep in its metadata."""
    del model.metadata_props[:]
    return model


def test_a_round_trip_gives_the_same_axes():
    found = layout(annotate(mlp(), make_mesh(*MESH), SPECS))
    assert found.parameters["w0"][0].spec == P(None, "model")
    assert dict(found.stages[0].mesh.shape) == {"data": 2, "model": 2}
    assert found.inputs["x"].spec == found.outputs["y1"].spec == P("data")
    assert found.parameters["b0"][0].spec == P()
    assert found.sharding(0, "b0") is None and found.sharding(2, "y0").spec == P("data")
    assert found.notes == ()


def test_without_metadata_a_mesh_is_made_to_fit():
    found = layout(unnamed(annotate(mlp(), make_mesh(*MESH), SPECS)))
    assert dict(found.stages[0].mesh.shape) == {"d0": 2, "d1": 2}
    assert found.parameters["w0"][0].spec == P(None, "d1")


def test_a_mesh_that_is_given():
    annotated = annotate(mlp(), make_mesh(*MESH), SPECS)
    mesh = make_mesh((2, 2), ("a", "b"), devices=jax.devices()[4:])
    found = layout(annotated, mesh)
    assert found.parameters["w1"][0].spec == P("b")
    assert found.stages[0].mesh == mesh
    with pytest.raises(AnnotationError, match=r"has 4 devices, the mesh 'a' .8. has 8"):
        layout(annotated, make_mesh((8,), ("a",)))


@pytest.mark.parametrize("named", [True, False])
def test_stages_have_a_mesh_each(named):
    annotated = annotate(mlp(), make_mesh(*MESH), SPECS, stages={"*0": 0, "*1": 1})
    found = layout(annotated if named else unnamed(annotated))
    first, second = found.stages
    axes = {"data": 2, "model": 2} if named else {"d0": 2, "d1": 2}
    assert dict(first.mesh.shape) == dict(second.mesh.shape) == axes
    assert [list(s.mesh.devices.flat) for s in found.stages] == [
        jax.devices()[:4],
        jax.devices()[4:],
    ]
    assert (first.nodes, first.inputs, first.outputs) == ((0, 1, 2), ("x",), ("y0",))
    assert (second.nodes, second.inputs, second.outputs) == ((3, 4, 5), ("y0",), ("y1",))
    assert list(found.parameters["w1"]) == [1] and found.parameters["w1"][1].mesh == second.mesh
    assert found.inputs["x"].mesh == first.mesh and found.outputs["y1"].mesh == second.mesh


def test_stages_along_an_axis_of_the_mesh():
    mesh = make_mesh((2, 2, 2), ("data", "stage", "model"))
    annotated = annotate(mlp(), mesh, SPECS, stages={"*0": 3, "*1": 7})
    for found in (layout(annotated), layout(annotated, mesh)):
        assert [stage.number for stage in found.stages] == [3, 7]
        assert found.devices == {3: (0, 1, 4, 5), 7: (2, 3, 6, 7)}
        assert dict(found.stages[1].mesh.shape) == {"data": 2, "model": 2}
        assert found.parameters["w1"][7].spec == P("model")


def test_a_parameter_of_two_stages_lies_in_both():
    model = mlp()
    model.graph.node[3].input[1] = "w0"
    found = layout(annotate(model, make_mesh(*MESH), {"w0": P("model")}, {"*0": 0, "*1": 1}))
    assert list(found.parameters["w0"]) == [0, 1]
    assert "w1" not in found.parameters
    assert "parameter 'w0' is in stages 0, 1" in found.notes


def test_a_parameter_that_is_read_in_two_ways():
    model = mlp()
    model.graph.node[3].input[1] = "w0"
    specs = {("up0", "w0"): P("model"), ("up1", "w0"): P(None, "data")}
    found = layout(annotate(model, make_mesh(*MESH), specs))
    assert found.parameters["w0"][0].spec == P("model")
    assert found.sharding(3, "w0").spec == P(None, "data")
    assert "read as P('model',), P(None, 'data') in stage 0; it is sharded as" in found.notes[0]


def test_uneven_axes():
    annotated = annotate(mlp(batch="n"), make_mesh(*MESH), SPECS)
    annotated.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    with pytest.raises(AnnotationError, match="node 'up0', tensor 'x', axis 0: its size 3"):
        layout(annotated)
    with pytest.warns(UserWarning, match=r"'x': shape .3, 8. does not split evenly"):
        found = layout(annotated, uneven="replicate")
    assert found.inputs["x"].spec == P()


def test_tensors_on_other_devices_than_their_stage():
    annotated = annotate(mlp(), make_mesh((4,), ("x",)), {"x": P("x"), "w0": None})
    spec = annotated.graph.node[0].device_configurations[0].sharding_spec[1]
    spec.index_to_device_group_map[0].value[:] = [0, 1]
    with pytest.raises(AnnotationError, match=r"'up0', tensor 'w0': it is on devices \[0, 1\]"):
        layout(annotated)


def test_faults_of_many_nodes_are_collected():
    annotated = annotate(mlp(), make_mesh(*MESH), SPECS)
    for node in annotated.graph.node:
        for entry in node.device_configurations:
            for spec in entry.sharding_spec:
                spec.sharded_dim.add(axis=5).simple_sharding.add(num_shards=2)
    with pytest.raises(AnnotationError, match="5 annotations do not fit") as caught:
        layout(annotated)
    assert "node 'up0', tensor 'w0', axis 5: the tensor has rank 2" in str(caught.value)


def test_a_record_that_does_not_fit_is_told():
    annotated = annotate(mlp(), make_mesh((4,), ("x",)), {"w0": P("x")})
    held = annotated.graph.node[0].device_configurations[0].sharding_spec[0]
    held.device[:] = [3, 1, 2, 0]
    found = layout(annotated)
    assert found.notes == ("specs do not follow the mesh kept in the file: meshes are made to fit",)
    assert [device.id for device in found.stages[0].mesh.devices.flat] == [3, 1, 2, 0]
    annotated.configuration[0].num_devices = 5
    del annotated.configuration[0].device[:], held.device[:]
    held.device.extend([0, 1, 2, 4])
    told = "the mesh kept in the file has 4 devices, the configuration 5: meshes are made to fit"
    assert layout(annotated).notes == (told,)


def test_the_table():
    annotated = annotate(mlp(layers=1), make_mesh(*MESH), SPECS_OF_ONE, {"*": 1})
    assert str(layout(annotated)).splitlines() == [
        "configuration 'default' of 4 devices",
        "stage 1: 3 nodes on devices 0-3, mesh (data=2, model=2)",
        "tensor  kind       shape    dtype    spec              bytes/device  stage",
        "x       input      (16, 8)  float32  P('data',)               256 B  1",
        "w0      parameter  (8, 8)   float32  P(None, 'model')         128 B  1",
        "b0      parameter  (8,)     float32  P()                       32 B  1",
        "h0      value      (16, 8)  float32  P('data',)               256 B  1",
        "y0      output     (16, 8)  float32  P('data',)               256 B  1",
    ]


SPECS_OF_ONE = {"x": P("data"), "w0": P(None, "model"), "h0": P("data"), "y0": P("data")}


def test_more_devices_than_there_are():
    annotated = annotate(mlp(), make_mesh((8,), ("x",)), {"w0": P("x")}, {"*0": 0, "*1": 1})
    with pytest.raises(DeviceError, match="needs 16 devices, there are 8"):
        layout(annotated)
