"""Mistakes with files, models of Flax, loaders, domains, plans of machines and the command line."""

import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import linen, nnx
from onnx import parser

import isoshard as iso
import isoshard.torch_bridge
from isoshard import P, Plan, weights
from isoshard.cli import main
from isoshard.jax_bridge import create_optimizer, train_step
from isoshard.planner import topology

from .mistakes import mistake

ROWS = np.ones((8, 4), np.float32)


def flax_linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@mistake(iso.CheckpointError, "there is no checkpoint", "does not exist")
def restore_from_nowhere(at):
    iso.restore(at.folder / "nowhere", {})


@mistake(iso.CheckpointError, "b: not in the checkpoint", "leave it out of `like`")
def restore_a_leaf_that_was_not_saved(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS, "b": ROWS})


@mistake(iso.CheckpointError, "a", "(8, 4)", "(4, 4)")
def restore_another_shape(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS[:4]})


@mistake(iso.CheckpointError, "step 7", "0")
def restore_a_step_that_was_not_saved(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS}, step=7)


@mistake(ValueError, "format is 'zarr', 'torch' or 'orbax'", "'pickle'")
def save_in_a_format_that_is_not_there(at):
    iso.save(at.folder / "a", {"a": ROWS}, format="pickle")


@mistake(TypeError, "f: builtin_function_or_method", "a checkpoint holds arrays")
def save_a_function(at):
    iso.save(at.folder / "a", {"f": print})


@mistake(iso.weights.FileFormatError, "a.safetensors", "header")
def a_file_of_weights_that_is_none(at):
    (at.folder / "a.safetensors").write_bytes(b"not a file of weights")
    iso.load_safetensors(at.folder / "a.safetensors", at.mesh, Plan({"*": None}))


@mistake(FileNotFoundError, "model.safetensors", "there is no such file or folder")
def a_file_of_weights_that_is_not_there(at):
    iso.load_safetensors(at.folder / "model.safetensors", at.mesh, Plan({"*": None}))


@mistake(iso.weights.WeightError, "kernel (4, 8): nothing becomes it", "Add a rule for each")
def weights_of_other_names(at):
    iso.save_safetensors(at.folder / "w", {"weight": ROWS})
    like = jax.eval_shape(lambda: {"kernel": jnp.ones((4, 8))})
    iso.load_safetensors(at.folder / "w", at.mesh, Plan({"*": None}), like=like)


@mistake(iso.weights.WeightError, "(8, 4)", "(8, 8)")
def weights_of_another_shape(at):
    iso.save_safetensors(at.folder / "w", {"w": ROWS})
    like = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    iso.load_safetensors(at.folder / "w", at.mesh, Plan({"*": None}), like=like)


@mistake(RuntimeError, 'parameter named "weight", expected torch.Tensor', "received <class 'jaxlib")
def arrays_of_flax_in_load_state_dict(at):
    torch.nn.Linear(8, 8).load_state_dict({"weight": jnp.ones((8, 8)), "bias": jnp.ones(8)})


@mistake(iso.PlanError, "no mesh axis is called 'z'", "'x' (2), 'y' (4)")
def create_over_an_axis_that_the_mesh_lacks(at):
    iso.create_sharded(flax_linear, at.mesh, Plan({"kernel": P("z")}))


@mistake(TypeError, "takes the function that makes the model", "fn=lambda: Linear(..)")
def create_from_a_model(at):
    iso.create_sharded(flax_linear(), at.mesh, Plan({"*": None}))


@mistake(TypeError, "not of a dict", "create_opt_state(tx, params, mesh, plan)")
def an_optimizer_of_variables(at):
    create_optimizer({"w": ROWS}, optax.sgd(0.1), at.mesh, Plan({"*": None}))


@mistake(TypeError, "only defined for scalar-output functions", "(8, 8)")
def a_loss_that_is_no_number(at):
    step = train_step(lambda model, x: model(x), optax.sgd(0.1), at.mesh, Plan({"*": None}))
    state = step.start(flax_linear())
    step(state, iso.shard(np.ones((8, 8), np.float32), at.mesh, P("x")))


@mistake(
    RuntimeError, "this state was donated to an earlier step", "state, loss = step(state, batch)"
)
def a_state_used_twice(at):
    step = train_step(lambda model, x: model(x).sum(), optax.sgd(0.1), at.mesh, Plan({"*": None}))
    state = step.start(flax_linear())
    batch = iso.shard(np.ones((8, 8), np.float32), at.mesh, P("x"))
    step(state, batch)
    step(state, batch)


@mistake(TypeError, "array is a Dense", "what its init returns")
def lay_out_a_linen_module(at):
    iso.shard(linen.Dense(3), at.mesh, Plan({"*": None}))


@mistake(iso.ShardingError, "5", "last=")
def a_last_batch_that_does_not_divide(at):
    batches = [np.ones((8, 4), np.float32), np.ones((5, 4), np.float32)]
    list(iso.data.loader(batches, at.mesh, P("x")))


@mistake(ValueError, "prefetch", "-1")
def a_loader_that_prefetches_less_than_nothing(at):
    list(iso.data.loader([ROWS], at.mesh, P("x"), prefetch=-1))


@mistake(
    TypeError,
    "halo_exchange takes a jax.Array or an UnevenArray, given was ndarray",
    "iso.shard(x, mesh, spec)",
)
def a_domain_verb_on_host_memory(at):
    iso.domain.halo_exchange(ROWS, 1, 0)


@mistake(iso.ShardingError, "halo_exchange", "axis 5")
def a_halo_along_an_axis_that_is_not_there(at):
    iso.domain.halo_exchange(iso.shard(ROWS, at.mesh, P("x")), 1, 5)


@mistake(iso.ShardingError, "'mirror'", "'zero'")
def a_halo_of_a_mode_that_is_not_there(at):
    iso.domain.halo_exchange(iso.shard(ROWS, at.mesh, P("x")), 1, 0, mode="mirror")


@mistake(ValueError, "k", "8")
def more_neighbours_than_points(at):
    points = iso.shard(np.ones((8, 3), np.float32), at.mesh, P("x"))
    iso.domain.knn(points, points, 20)


TEXT = """<ir_version: 11, opset_import: ["" : 21]>
one (float[16, 8] x) => (float[16, 8] y) { [first] y = Relu(x) }"""


@mistake(iso.onnx.AnnotationError, "no value or parameter is called 'w'", "there is 'x', 'y'")
def annotate_a_tensor_that_is_not_there(at):
    iso.onnx.annotate(parser.parse_model(TEXT), at.mesh, {"w": P("x")})


@mistake(iso.onnx.ModelError, "model.onnx: not a model that can be read", "No such file")
def load_a_model_that_is_not_there(at):
    iso.onnx.load(at.folder / "model.onnx")


@mistake(iso.onnx.ModelError, "model.onnx", "ONNX")
def load_a_model_that_is_none(at):
    (at.folder / "model.onnx").write_bytes(b"PK\x03\x04 no protocol buffer")
    iso.onnx.load(at.folder / "model.onnx")


@mistake(
    iso.onnx.AnnotationError,
    "the model has no device configuration",
    "iso.onnx.annotate(model, mesh, specs)",
)
def layout_of_a_model_without_annotations(at):
    iso.onnx.layout(parser.parse_model(TEXT))


@mistake(iso.onnx.ModelError, "takes x: float32[16, 8]", "x: axis 0 has size 3, not 16")
def run_a_model_on_another_shape(at):
    model = iso.onnx.annotate(parser.parse_model(TEXT), at.mesh, {"x": P("x")})
    iso.onnx.compile(model)(np.ones((3, 8), np.float32))


@mistake(iso.onnx.ModelError, "Bernouli", "isoshard.onnx.operator")
def run_an_operator_that_is_not_known(at):
    model = parser.parse_model(TEXT.replace("Relu", "Bernouli"))
    model = iso.onnx.annotate(model, at.mesh, {"x": P("x")})
    iso.onnx.compile(model)(np.ones((16, 8), np.float32))


@mistake(RuntimeError, "no command 'dmeo', did you mean 'demo'?", "The commands are doctor, demo")
def a_command_that_is_not_there(at):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        status = main(["dmeo"])
    assert status == 2
    raise RuntimeError(printed.getvalue())


@mistake(iso.ShardingError, "there is no chip 'v9'; known are", "iso.planner.add_chip")
def a_chip_that_is_not_known(at):
    topology("v9:4x4")


@mistake(ValueError, "4 chips", "v5e")
def a_topology_in_another_form(at):
    topology("v5e 4 chips")


@mistake(iso.ShardingError, "'v5e' is no topology", "such as 'v5e:16x16'")
def plan_for_no_machine(at):
    iso.planner.estimate(lambda x: x, (ROWS,), "v5e")


@mistake(ValueError, "depth", "'trace'", "'partition'", "'compile'")
def plan_at_a_depth_that_is_not_there(at):
    iso.planner.estimate(lambda x: x * 2, (ROWS,), at.mesh, depth="deep")


@mistake(iso.ShardingError, "a DTensor has one per process", "iso.to_torch(array)")
def a_dtensor_without_processes(at):
    iso.to_dtensor(iso.shard(ROWS, at.mesh, P("x")))


@mistake(iso.DistributedError, "MASTER_ADDR is not set", "Start the script with torchrun")
def torchrun_half_set(at):
    from isoshard.core.processes.launchers import launch_from

    launch_from({"RANK": "0", "WORLD_SIZE": "4"})


@mistake(TypeError, "given was ndarray", "iso.shard(x, mesh, spec)")
def local_shards_of_host_memory(at):
    iso.local_shards(ROWS)


@mistake(ValueError, "'tensorflow'", "'torch'", "'jax'")
def local_shards_of_a_framework_that_is_not_there(at):
    iso.local_shards(iso.shard(ROWS, at.mesh, P("x")), framework="tensorflow")


@mistake(iso.UnevenError, "shape (9, 4) does not split evenly", "Pad it to 10")
def from_local_of_a_shape_that_does_not_fit(at):
    iso.from_local(ROWS, at.mesh, P("x"), shape=(9, 4))


@mistake(FileExistsError, "File exists", "cache")
def a_compilation_cache_that_is_a_file(at):
    (at.folder / "cache").write_text("")
    iso.compilation_cache(at.folder / "cache")


@mistake(weights.WeightError, "w (8, 4): Transpose(axes=(2, 1, 0))", "does not fit rank 2")
def a_rule_of_weights_that_does_not_fit(at):
    rule = weights.Rule("w", "w", weights.Transpose((2, 1, 0)))
    weights.WeightMap([rule]).apply({"w": ROWS})
