"""Pipeline stages: who names them, and where they lie."""

import pytest
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import AnnotationError, annotate
from isoshard.onnx_bridge.reading.mesh_record import MeshRecord, read_mesh
from tests.onnx_bridge.models import mlp


@pytest.fixture
def mesh():
    return make_mesh((2, 2), ("data", "model"))


def stages(model):
    return [node.device_configurations[0].pipeline_stage for node in model.graph.node]


def devices(model, at):
    (entry,) = model.graph.node[at].device_configurations
    return [list(group.value) for group in entry.sharding_spec[0].index_to_device_group_map]


def test_a_function_of_the_node(mesh):
    def stage(node):
        return {"MatMul": int(node.name[-1])}.get(node.op_type)

    assert stages(annotate(mlp(), mesh, {}, stage)) == [0, 0, 0, 1, 1, 1]


def test_names_of_modules(mesh):
    model = mlp()
    for node in model.graph.node:
        scopes = str(["", f"blocks.{node.name[-1]}", node.name])
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    assert stages(annotate(model, mesh, {}, {"blocks.0": 4, "*": 9})) == [4, 4, 4, 9, 9, 9]


def test_stage_after_stage_lies_on_the_next_devices(mesh):
    done = annotate(mlp(), mesh, {"w?": P("model")}, {"*0": 0, "*1": 1})
    assert done.configuration[0].num_devices == 8
    assert devices(done, 0) == [[0, 2], [1, 3]] and devices(done, 3) == [[4, 6], [5, 7]]
    expected = MeshRecord((("stage", 2), ("data", 2), ("model", 2)), "stage")
    assert read_mesh(done, "default") == expected


def test_stages_along_an_axis():
    mesh = make_mesh((2, 2, 2), ("data", "pipe", "model"))
    done = annotate(mlp(), mesh, {"w?": P("model")}, {"*0": 0, "*1": 1}, stage_axis="pipe")
    assert done.configuration[0].num_devices == 8
    assert devices(done, 0) == [[0, 4], [1, 5]] and devices(done, 3) == [[2, 6], [3, 7]]
    with pytest.raises(AnnotationError, match="no mesh axis is called 'pipe'"):
        annotate(mlp(), mesh, {"w0": P("pipe")}, {"*0": 0, "*1": 1}, stage_axis="pipe")


@pytest.mark.parametrize(("given", "match"), [
    ({"up7": 0}, "stages has 'up7', which match no node or module.*'up0', 'bias0'"),
    (lambda node: None, "no node gets one"),
    (lambda node: "first", "node 'up0' gets 'first'"),
    (lambda node: True, "node 'up0' gets True"),
    ({"*0": 1, "*1": 0}, "node 'up1', tensor 'y0': it is made in stage 1 and read in stage 0"),
    ({"*0": -1}, "its stage is -1"),
    ({"re:(": 0}, "not a regular expression"),
])  # fmt: skip
def test_stages_that_are_none(mesh, given, match):
    with pytest.raises(ValueError, match=match):
        annotate(mlp(), mesh, {}, given)


def test_an_axis_of_another_size():
    mesh = make_mesh((4, 2), ("stage", "model"))
    with pytest.raises(AnnotationError, match=r"2 stages, 0, 1, and the mesh .* room for 4 along"):
        annotate(mlp(), mesh, {}, {"*0": 0, "*1": 1})
