"""What users of JAX do wrong in the first hours, and what they are told: what, where, the fix."""

import contextlib
import io
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
import pytest
import torch
from flax import linen, nnx
from onnx import parser

import isoshard as iso
import isoshard.torch_bridge
import isoshard.torch_bridge as xs
from isoshard import P, Plan, weights
from isoshard.cli import main
from isoshard.core.plan import UnusedRuleWarning
from isoshard.jax_bridge import create_opt_state, create_optimizer, train_step
from isoshard.planner import topology
from tests.newcomer.mistakes import Desk, told

ROWS = np.ones((8, 4), np.float32)


def linear():
    return torch.nn.Linear(8, 8)


def flax_linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


TEXT = """<ir_version: 11, opset_import: ["" : 21]>
one (float[16, 8] x) => (float[16, 8] y) { [first] y = Relu(x) }"""


def shard_inside_shard_map(at):
    inside = jax.shard_map(
        lambda x: iso.shard(x, at.mesh, P("x")), mesh=at.mesh, in_specs=P("x"), out_specs=P("x")
    )
    inside(iso.shard(ROWS, at.mesh, P("x")))


def a_name_that_is_misspelt(at):
    _ = iso.visualise


def a_glob_that_wants_a_dot_before(at):
    class Model(nnx.Module):
        def __init__(self):
            self.up = flax_linear()

    iso.shard(Model(), at.mesh, Plan({"*.up.*": P("x")}))


def a_misspelt_rule_of_a_restored_model(at):
    with tempfile.TemporaryDirectory() as folder:
        iso.save(folder, {"model": linear()})
        iso.restore(folder, {"model": linear()}, mesh=at.mesh, plan=Plan({"wieght": P("x")}))


def a_misspelt_rule_of_an_annotated_model(at):
    weight = onnx.helper.make_tensor("weight", 1, [8, 4], [0.0] * 32)
    x = onnx.helper.make_tensor_value_info("x", 1, [2, 8])
    y = onnx.helper.make_tensor_value_info("y", 1, [2, 4])
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [x], [y], [weight])
    model = onnx.helper.make_model(graph, ir_version=11)
    iso.onnx.annotate(model, at.mesh, Plan({"wieght": P("x")}))


def a_misspelt_rule_for_activations_in_torch(at):
    model = torch.nn.Sequential()
    model.add_module("up", linear())
    model.add_module("down", linear())
    rules = {"up": P("x"), "dwn": P("x")}
    xs.constrain_activations(model, at.mesh, rules)


def a_misspelt_rule_for_activations_in_flax(at):
    model = nnx.Sequential(flax_linear(), flax_linear())
    rules = {"layers.1": P("x"), "layers.00": P("x")}
    with iso.jax_bridge.constrain_activations(at.mesh, rules, model):
        pass


def a_misspelt_rule_of_a_training_step(at):
    plan = Plan({"kernl": P("x")})
    train_step(lambda model, x: model(x).sum(), optax.sgd(0.1), at.mesh, plan).start(flax_linear())


def activations_over_an_axis_that_the_mesh_lacks(at):
    plan = Plan({"*": None}, activations={"*": P("z")})
    xs.constrain_activations(linear(), at.mesh, plan)


def activations_of_a_module_that_is_misspelt(at):
    model = torch.nn.Sequential()
    model.add_module("mlp", linear())
    plan = Plan({"*": None}, activations={"mpl": P("x")})
    xs.constrain_activations(model, at.mesh, plan)


def restore_a_leaf_that_was_not_saved(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS, "b": ROWS})


def restore_another_shape(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS[:4]})


def restore_a_step_that_was_not_saved(at):
    iso.save(at.folder / "a", {"a": ROWS})
    iso.restore(at.folder / "a", {"a": ROWS}, step=7)


def a_file_of_weights_that_is_none(at):
    (at.folder / "a.safetensors").write_bytes(b"not a file of weights")
    iso.load_safetensors(at.folder / "a.safetensors", at.mesh, Plan({"*": None}))


def weights_of_other_names(at):
    iso.save_safetensors(at.folder / "w", {"weight": ROWS})
    like = jax.eval_shape(lambda: {"kernel": jnp.ones((4, 8))})
    iso.load_safetensors(at.folder / "w", at.mesh, Plan({"*": None}), like=like)


def a_loss_that_is_no_number(at):
    step = train_step(lambda model, x: model(x), optax.sgd(0.1), at.mesh, Plan({"*": None}))
    state = step.start(flax_linear())
    step(state, iso.shard(np.ones((8, 8), np.float32), at.mesh, P("x")))


def a_state_used_twice(at):
    step = train_step(lambda model, x: model(x).sum(), optax.sgd(0.1), at.mesh, Plan({"*": None}))
    state = step.start(flax_linear())
    batch = iso.shard(np.ones((8, 8), np.float32), at.mesh, P("x"))
    step(state, batch)
    step(state, batch)


def a_last_batch_that_does_not_divide(at):
    batches = [np.ones((8, 4), np.float32), np.ones((5, 4), np.float32)]
    list(iso.data.loader(batches, at.mesh, P("x")))


def more_neighbours_than_points(at):
    points = iso.shard(np.ones((8, 3), np.float32), at.mesh, P("x"))
    iso.domain.knn(points, points, 20)


def a_command_that_is_not_there(at):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        status = main(["dmeo"])
    assert status == 2
    raise RuntimeError(printed.getvalue())


def torchrun_half_set(at):
    from isoshard.core.processes.launchers import launch_from

    launch_from({"RANK": "0", "WORLD_SIZE": "4"})


def a_compilation_cache_that_is_a_file(at):
    (at.folder / "cache").write_text("")
    iso.compilation_cache(at.folder / "cache")


def a_rule_of_weights_that_does_not_fit(at):
    rule = weights.Rule("w", "w", weights.Transpose((2, 1, 0)))
    weights.WeightMap([rule]).apply({"w": ROWS})


# The class of the error or warning, the mistake, and parts of the message: what, where, how to fix.
MISTAKES = [
    (ValueError,
     lambda at: iso.local_shards(iso.shard(ROWS, at.mesh, P("x")), framework="tensorflow"),
     "'tensorflow'", "'torch'", "'jax'"),
    (iso.PlanError, lambda at: Plan(P("x")), "P('x',)", "Plan({'*': P('x',)})"),
    (iso.errors.SpecError, lambda at: iso.shard(ROWS, at.mesh, P("z")),
     "no mesh axis is called 'z'", "The mesh axes are 'x' (2), 'y' (4)"),
    (iso.errors.SpecError, lambda at: iso.shard(ROWS, at.mesh, P("x", "x")),
     "'x' is used 2 times", "The mesh axes are"),
    (iso.errors.SpecError, lambda at: iso.shard(ROWS, at.mesh, P("x", None, "y"), name="w"),
     "w: ", "3 entries", "rank 2"),
    (iso.errors.SpecError, lambda at: iso.shard(ROWS, at.mesh, (7, None)),
     "there is no mesh axis 7", "give their indices 0..1"),
    (iso.errors.UnevenError, lambda at: iso.shard(np.ones((6, 4), np.float32), at.mesh, P("y")),
     "axis 0 has size 6", "Pad it to 8"),
    (iso.ShardingError, lambda at: iso.shard({"a": {"w": ROWS[:7],
     "b": np.ones(3, np.float32)}}, at.mesh, P("x")),
     "2 leaves cannot be sharded", "nothing was changed", "a.w", "a.b"),
    (TypeError, lambda at: iso.shard(ROWS, at.mesh),
     "there is no spec for the mesh", "P() to replicate"),
    (iso.ShardingError, lambda at: iso.shard(ROWS, P("x")), "no mesh", "jax.set_mesh"),
    (TypeError, lambda at: iso.shard(ROWS, P("x"), at.mesh), "a mesh", "iso.make_mesh"),
    (TypeError, lambda at: iso.shard("weights.npy", at.mesh, P("x")),
     "array is a str", "iso.load_safetensors"),
    (iso.errors.CopyError, lambda at: iso.shard(np.array([object(), None]), at.mesh, P()),
     "array: JAX has no dtype object", "Convert it with .astype(..)"),
    (iso.errors.SpecError, lambda at: iso.shard({"a": ROWS, "b": ROWS}, at.mesh, {"a": P("x")}),
     "the tree of specs does not match", "no spec for b", "a Plan"),
    (iso.errors.CopyError, lambda at: iso.shard(np.ones((8, 4)), at.mesh, P("x"), copy=False),
     "float64 is stored as float32", "Pass copy=None or copy=True"),
    (iso.errors.CopyError, lambda at: iso.shard(np.array([2**40, 1]), at.mesh, P("x")),
     "2147483647", "jax_enable_x64"),
    (iso.errors.DeviceError, lambda at: iso.make_mesh((4, 4), ("x", "y")),
     "needs 16 devices, there are 8", "iso.simulate_devices(16)"),
    (iso.ShardingError, lambda at: iso.make_mesh((2, 4), ("x",)),
     "shape (2, 4)", "names ('x',)", "one name"),
    (iso.ShardingError, lambda at: iso.make_mesh((2, 4), ("x", "x")),
     "name 'x' is used 2 times", "make_mesh((2, 4), ('x', 'y'))"),
    (iso.ShardingError, lambda at: iso.make_mesh(8, "x"),
     "the shape of a mesh is a tuple", "iso.make_mesh((8,), ('x',))"),
    (iso.errors.DeviceError, lambda at: iso.simulate_devices(16),
     "already running on 8 cpu devices", "first in a new process"),
    (iso.ShardingError, lambda at: iso.shard(ROWS, at.mesh, P("x"), uneven="chunk"),
     "uneven is 'error' or 'pad'", "'chunk'"),
    (iso.ShardingError, lambda at: iso.shard(ROWS, at.mesh, P("x"), sizes=(5, 3)),
     "sizes", "uneven='pad'"),
    (iso.errors.UnevenError,
     lambda at: iso.shard(ROWS, at.mesh, P("x"), uneven="pad", sizes=(5, 4)),
     "axis 0 is given 9 elements, and has 8", "Give one size per block"),
    (iso.ShardingError, lambda at: iso.shard(ROWS, at.mesh, P("x"), memory="gpu_host"),
     "'gpu_host'", "pinned_host"),
    (TypeError, lambda at: iso.shard(ROWS[:7], at.mesh, P("x"), uneven="pad") + 1,
     "an UnevenArray has padding", "iso.domain.lift(f)", "iso.full(u)"),
    (AttributeError, lambda at: iso.shard(ROWS[:7], at.mesh, P("x"), uneven="pad").sum(),
     "an UnevenArray has no 'sum'", "iso.domain.lift(f)", "iso.full(u)"),
    (TypeError, lambda at: iso.full(ROWS),
     "full takes arrays on devices", "ndarray", "iso.shard(x, mesh, spec)"),
    (TypeError, lambda at: iso.sharding_of(ROWS),
     "sharding_of takes arrays on devices", "iso.shard(x, mesh, spec)"),
    (iso.ShardingError, lambda at: jax.jit(lambda x: iso.sharding_of(x) and x)(iso.shard(ROWS,
     at.mesh, P("x"))),
     "a traced value on Auto axes has no sharding yet", "iso.shard"),
    (iso.ShardingError, shard_inside_shard_map, "jax.shard_map", "in_specs"),
    (iso.errors.SpecError, lambda at: iso.visualize(P("x")),
     "names no devices", "visualize(.., mesh=..)"),
    (TypeError, lambda at: iso.visualize(ROWS),
     "cannot draw a ndarray", "sharded by isoshard.shard"),
    (AttributeError, a_name_that_is_misspelt,
     "'isoshard' has no attribute 'visualise'", "did you mean isoshard.visualize?"),
    (UnusedRuleWarning, lambda at: iso.shard(linear(), at.mesh, Plan({"wieght": P("x")})),
     "rules that decide nothing here:\n  'wieght'", "the nearest is 'weight'"),
    (UnusedRuleWarning, lambda at: iso.shard({"block": {"w": np.ones((8, 8), np.float32)}},
     at.mesh, Plan({"blok.w": P("x")})),
     "'blok.w'", "'block.w'"),
    (UnusedRuleWarning, a_glob_that_wants_a_dot_before,
     "'*.up.*': no leaf is called so, as nothing stands before its dot", "'*up.*' takes 'up."),
    (UnusedRuleWarning, lambda at: iso.create_sharded(flax_linear, at.mesh, Plan({"kernl":
     P("x")})),
     "'kernl'", "'kernel'"),
    (UnusedRuleWarning, a_misspelt_rule_of_a_restored_model, "'wieght'", "'weight'"),
    (UnusedRuleWarning, a_misspelt_rule_of_an_annotated_model, "'wieght'", "'weight'"),
    (UnusedRuleWarning, a_misspelt_rule_for_activations_in_torch,
     "'dwn': no module is called so", "nearest is 'down'"),
    (UnusedRuleWarning, a_misspelt_rule_for_activations_in_flax,
     "'layers.00': no module is called so", "'layers.0'"),
    (UnusedRuleWarning, a_misspelt_rule_of_a_training_step, "'kernl'", "'kernel'"),
    (iso.PlanError, lambda at: Plan({"wieght": P("x")}).resolve(linear(), at.mesh, strict=True),
     "strict=True", "'wieght' decides nothing", "weight: no rule matches"),
    (iso.PlanError, lambda at: iso.shard(flax_linear(), at.mesh, Plan({"*.kernel": P("z")})),
     "'*.kernel'", "no mesh axis is called 'z'", "'x' (2), 'y' (4)"),
    (iso.PlanError, lambda at: iso.shard(linear(), at.mesh, Plan.tensor_parallel("tp")),
     "no mesh axis is called 'tp'", "'x' (2), 'y' (4)"),
    (UnusedRuleWarning, lambda at: iso.shard(linear(), at.mesh, Plan.tensor_parallel("y")),
     "column", "'weight'"),
    (iso.PlanError, lambda at: iso.shard({"large": np.ones((512, 1024), np.float32)}, at.mesh,
     Plan({"*.w": P("x")})),
     "large: shape (512, 1024)", "default=P()"),
    (iso.PlanError, lambda at: Plan({"*.q_proj.weight": P("x")}).resolve({"a.q_proj.kernel": (8,
     8)}, at.mesh),
     "'*.q_proj.weight' decides nothing", "write '*.q_proj.*': Linear(out='x')"),
    (iso.PlanError, lambda at: Plan("x"), "'x'", "Plan({'*': 'x'})"),
    (iso.PlanError, lambda at: Plan({"weight", "bias"}),
     "rules are a mapping, or pairs, of name patterns and specs", "Plan({'*': P('x',)})"),
    (iso.PlanError, lambda at: Plan({"re:a.(": P("x")}),
     "'re:a.(' is not a regular expression", "names, globs or 're:..'"),
    (iso.PlanError, lambda at: Plan({"re:(a+)+b": P("x")}), "could take forever", "write a glob"),
    (iso.PlanError, lambda at: Plan([("w", P("x")), ("w", P("y"))]),
     "'w' is repeated", "patterns of a plan are names, globs"),
    (iso.PlanError, lambda at: Plan({"w": ("embed",)}, axes={"mlp": "x"}).resolve({"w": (8, 8)},
     at.mesh),
     "w: 'embed' is neither a logical axis of the plan ('mlp') nor a mesh axis ('x', 'y')",
     "add it to axes"),
    (iso.PlanError, lambda at: Plan({"*": None}).for_inputs(),
     "has no rule for inputs", "Plan(.., inputs=P(..))"),
    (iso.PlanError, lambda at: Plan.from_hf_tp_plan(linear()),
     "carries no tensor-parallel plan", "Plan.tensor_parallel(axis"),
    (iso.PlanError, lambda at: Plan.from_hf_tp_plan({"layers.*.q": "colwize"}),
     "'colwize'", "the known ones are", "colwise"),
    (iso.PlanError, lambda at: Plan.tensor_parallel("x", weights="in"),
     "weights is 'out_in' or 'in_out'", "'in'"),
    (iso.PlanError, lambda at: (Plan({"w": P("x")}) * Plan({"w": P(None,
     "x")})).resolve({"w": (8, 8)}, at.mesh),
     "w: the factors of the plan disagree", "Give each factor mesh axes of its own"),
    (iso.ShardingError, lambda at: iso.shard(flax_linear(), at.mesh, Plan({"*": None},
     memory={"*": "hots"})),
     "'hots'", "pinned_host"),
    (TypeError, lambda at: create_opt_state(optax.adam(0.1), jax.tree.map(np.asarray, {"w":
     np.ones(8)}), at.mesh),
     "a plan", "create_opt_state(tx, params, mesh, plan)"),
    (iso.PlanError, lambda at: iso.shard(linear(), at.mesh, Plan({"weight": ("x", ...),
     "*": None})),
     "weight: spec ('x', Ellipsis) does not fit", "The mesh axes are 'x' (2), 'y' (4): name them"),
    (iso.ShardingError, activations_over_an_axis_that_the_mesh_lacks,
     "no mesh axis is called 'z'", "'x' (2), 'y' (4)"),
    (iso.PlanError, activations_of_a_module_that_is_misspelt,
     "no activation rule of the plan matches a module of Sequential", "its modules are '', 'mlp'"),
    (iso.CheckpointError, lambda at: iso.restore(at.folder / "nowhere", {}),
     "there is no checkpoint", "does not exist"),
    (iso.CheckpointError, restore_a_leaf_that_was_not_saved,
     "b: not in the checkpoint", "leave it out of `like`"),
    (iso.CheckpointError, restore_another_shape, "a", "(8, 4)", "(4, 4)"),
    (iso.CheckpointError, restore_a_step_that_was_not_saved, "step 7", "0"),
    (ValueError, lambda at: iso.save(at.folder / "a", {"a": ROWS}, format="pickle"),
     "format is 'zarr', 'torch' or 'orbax'", "'pickle'"),
    (TypeError, lambda at: iso.save(at.folder / "a", {"f": print}),
     "f: builtin_function_or_method", "a checkpoint has arrays"),
    (iso.weights.FileFormatError, a_file_of_weights_that_is_none, "a.safetensors", "header"),
    (FileNotFoundError, lambda at: iso.load_safetensors(at.folder / "model.safetensors", at.mesh,
     Plan({"*": None})),
     "model.safetensors", "there is no such file or folder"),
    (iso.weights.WeightError, weights_of_other_names,
     "kernel (4, 8): no rule makes it", "Add a rule for each"),
    (iso.PlanError, lambda at: iso.create_sharded(flax_linear, at.mesh, Plan({"kernel": P("z")})),
     "no mesh axis is called 'z'", "'x' (2), 'y' (4)"),
    (TypeError, lambda at: iso.create_sharded(flax_linear(), at.mesh, Plan({"*": None})),
     "takes the function that creates the model", "fn=lambda: Linear(..)"),
    (TypeError, lambda at: create_optimizer({"w": ROWS}, optax.sgd(0.1), at.mesh, Plan({"*":
     None})),
     "not a dict", "create_opt_state(tx, params, mesh, plan)"),
    (TypeError, a_loss_that_is_no_number, "only defined for scalar-output functions", "(8, 8)"),
    (RuntimeError, a_state_used_twice,
     "this state was donated to an earlier step", "state, loss = step(state, batch)"),
    (TypeError, lambda at: iso.shard(linen.Dense(3), at.mesh, Plan({"*": None})),
     "array is a Dense", "what its init returns"),
    (iso.ShardingError, a_last_batch_that_does_not_divide, "5", "last="),
    (ValueError, lambda at: list(iso.data.loader([ROWS], at.mesh, P("x"), prefetch=-1)),
     "prefetch", "-1"),
    (TypeError, lambda at: iso.domain.halo_exchange(ROWS, 1, 0),
     "halo_exchange takes a jax.Array or an UnevenArray, got ndarray",
     "iso.shard(x, mesh, spec)"),
    (iso.ShardingError, lambda at: iso.domain.halo_exchange(iso.shard(ROWS, at.mesh, P("x")), 1, 5),
     "halo_exchange", "axis 5"),
    (iso.ShardingError, lambda at: iso.domain.halo_exchange(iso.shard(ROWS, at.mesh, P("x")), 1,
     0, mode="mirror"),
     "'mirror'", "'zero'"),
    (ValueError, more_neighbours_than_points, "k", "8"),
    (iso.onnx.AnnotationError, lambda at: iso.onnx.layout(parser.parse_model(TEXT)),
     "the model has no device configuration", "iso.onnx.annotate(model, mesh, specs)"),
    (RuntimeError, a_command_that_is_not_there,
     "no command 'dmeo', did you mean 'demo'?", "The commands are doctor, demo"),
    (iso.ShardingError, lambda at: topology("v9:4x4"),
     "there is no chip 'v9'; there are", "iso.planner.add_chip"),
    (ValueError, lambda at: topology("v5e 4 chips"), "4 chips", "v5e"),
    (iso.ShardingError, lambda at: iso.planner.estimate(lambda x: x, (ROWS,), "v5e"),
     "'v5e' is not a topology", "such as 'v5e:16x16'"),
    (ValueError, lambda at: iso.planner.estimate(lambda x: x * 2, (ROWS,), at.mesh, depth="deep"),
     "depth", "'trace'", "'partition'", "'compile'"),
    (iso.ShardingError, lambda at: iso.to_dtensor(iso.shard(ROWS, at.mesh, P("x"))),
     "a DTensor has one per process", "iso.to_torch(array)"),
    (iso.errors.DistributedError, torchrun_half_set,
     "MASTER_ADDR is not set", "Start the script with torchrun"),
    (TypeError, lambda at: iso.local_shards(ROWS), "not a ndarray", "iso.shard(x, mesh, spec)"),
    (iso.errors.UnevenError, lambda at: iso.from_local(ROWS, at.mesh, P("x"), shape=(9, 4)),
     "shape (9, 4) does not split evenly", "Pad it to 10"),
    (FileExistsError, a_compilation_cache_that_is_a_file, "File exists", "cache"),
    (weights.WeightError, a_rule_of_weights_that_does_not_fit,
     "w (8, 4): Transpose(axes=(2, 1, 0))", "does not fit rank 2"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make", "texts"), [(k, m, t) for k, m, *t in MISTAKES])
def test_a_mistake_is_told(kind, make, texts, tmp_path):
    found = told(make, Desk(tmp_path))
    assert isinstance(found, kind), repr(found)
    assert len(texts) > 1 and [text for text in texts if text not in str(found)] == [], str(found)
