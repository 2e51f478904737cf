"""Mistakes in plans."""

import tempfile

import jax
import numpy as np
import onnx
import optax
import torch
from flax import nnx

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from isoshard.core.plan import UnusedRuleWarning
from isoshard.jax_bridge import create_opt_state, train_step

from .mistakes import mistake


def linear():
    return torch.nn.Linear(8, 8)


def flax_linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


@mistake(
    UnusedRuleWarning, "rules that decide nothing here:\n  'wieght'", "the nearest is 'weight'"
)
def a_misspelt_rule_for_torch(at):
    iso.shard(linear(), at.mesh, Plan({"wieght": P("x")}))


@mistake(UnusedRuleWarning, "'wieght'", "'weight'")
def a_misspelt_rule_before_one_for_all(at):
    iso.shard(linear(), at.mesh, Plan({"wieght": P("x"), "*": None}))


@mistake(UnusedRuleWarning, "'kernl'", "'kernel'")
def a_misspelt_rule_for_flax(at):
    iso.shard(flax_linear(), at.mesh, Plan({"kernl": P("x")}))


@mistake(UnusedRuleWarning, "'blok.w'", "'block.w'")
def a_misspelt_rule_for_a_tree(at):
    iso.shard({"block": {"w": np.ones((8, 8), np.float32)}}, at.mesh, Plan({"blok.w": P("x")}))


@mistake(
    UnusedRuleWarning,
    "'*.up.*': no leaf is called so, as nothing stands before its dot",
    "'*up.*' takes 'up.",
)
def a_glob_that_wants_a_dot_before(at):
    class Model(nnx.Module):
        def __init__(self):
            self.up = flax_linear()

    iso.shard(Model(), at.mesh, Plan({"*.up.*": P("x")}))


@mistake(UnusedRuleWarning, "'kernl'", "'kernel'")
def a_misspelt_rule_of_a_created_model(at):
    iso.create_sharded(flax_linear, at.mesh, Plan({"kernl": P("x")}))


@mistake(UnusedRuleWarning, "'wieght'", "'weight'")
def a_misspelt_rule_of_a_restored_model(at):
    with tempfile.TemporaryDirectory() as folder:
        iso.save(folder, {"model": linear()})
        iso.restore(folder, {"model": linear()}, mesh=at.mesh, plan=Plan({"wieght": P("x")}))


@mistake(UnusedRuleWarning, "'rtes'", "'rates'")
def a_misspelt_rule_of_a_restored_tree(at):
    tree = {"rates": np.ones((8, 8), np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        iso.save(folder, tree)
        iso.restore(folder, tree, mesh=at.mesh, plan=Plan({"rtes": P("x")}))


@mistake(UnusedRuleWarning, "'wieght'", "'weight'")
def a_misspelt_rule_of_an_annotated_model(at):
    weight = onnx.helper.make_tensor("weight", 1, [8, 4], [0.0] * 32)
    x = onnx.helper.make_tensor_value_info("x", 1, [2, 8])
    y = onnx.helper.make_tensor_value_info("y", 1, [2, 4])
    node = onnx.helper.make_node("MatMul", ["x", "weight"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [x], [y], [weight])
    model = onnx.helper.make_model(graph, ir_version=11)
    iso.onnx.annotate(model, at.mesh, Plan({"wieght": P("x")}))


@mistake(UnusedRuleWarning, "'dwn': no module is called so", "nearest is 'down'")
def a_misspelt_rule_for_activations_in_torch(at):
    model = torch.nn.Sequential()
    model.add_module("up", linear())
    model.add_module("down", linear())
    rules = {"up": P("x"), "dwn": P("x")}
    xs.constrain_activations(model, at.mesh, rules)


@mistake(UnusedRuleWarning, "'layers.00': no module is called so", "'layers.0'")
def a_misspelt_rule_for_activations_in_flax(at):
    model = nnx.Sequential(flax_linear(), flax_linear())
    rules = {"layers.1": P("x"), "layers.00": P("x")}
    with iso.jax_bridge.constrain_activations(at.mesh, rules, model):
        pass


@mistake(UnusedRuleWarning, "'kernl'", "'kernel'")
def a_misspelt_rule_of_a_training_step(at):
    plan = Plan({"kernl": P("x")})
    train_step(lambda model, x: model(x).sum(), optax.sgd(0.1), at.mesh, plan).start(flax_linear())


@mistake(iso.PlanError, "strict=True", "'wieght' decides nothing", "weight: no rule matches")
def strict_says_what_is_left(at):
    Plan({"wieght": P("x")}).resolve(linear(), at.mesh, strict=True)


@mistake(iso.PlanError, "'*.kernel'", "no mesh axis is called 'z'", "'x' (2), 'y' (4)")
def an_axis_that_the_mesh_lacks_in_a_rule_that_matches_nothing(at):
    iso.shard(flax_linear(), at.mesh, Plan({"*.kernel": P("z")}))


@mistake(iso.PlanError, "kernel", "no mesh axis is called 'z'", "'x' (2), 'y' (4)")
def an_axis_that_the_mesh_lacks(at):
    iso.shard(flax_linear(), at.mesh, Plan({"kernel": P("z")}))


@mistake(iso.PlanError, "no mesh axis is called 'tp'", "'x' (2), 'y' (4)")
def tensor_parallel_on_a_mesh_without_its_axis(at):
    iso.shard(linear(), at.mesh, Plan.tensor_parallel("tp"))


@mistake(UnusedRuleWarning, "column", "'weight'")
def tensor_parallel_on_names_that_it_does_not_know(at):
    iso.shard(linear(), at.mesh, Plan.tensor_parallel("y"))


@mistake(iso.PlanError, "fsdp", "no mesh axis is called 'fsdp'", "'x' (2), 'y' (4)")
def fsdp_on_a_mesh_without_its_axis(at):
    iso.shard(linear(), at.mesh, Plan.fsdp())


@mistake(iso.PlanError, "large: shape (512, 1024)", "default=P()")
def a_large_leaf_without_a_rule(at):
    iso.shard({"large": np.ones((512, 1024), np.float32)}, at.mesh, Plan({"*.w": P("x")}))


@mistake(iso.PlanError, "'*.q_proj.weight' decides nothing", "write '*.q_proj.*': Linear(out='x')")
def names_of_another_framework(at):
    Plan({"*.q_proj.weight": P("x")}).resolve({"a.q_proj.kernel": (8, 8)}, at.mesh)


@mistake(iso.PlanError, "'x'", "Plan({'*': 'x'})")
def a_string_for_rules(at):
    Plan("x")


@mistake(iso.PlanError, "P('x',)", "Plan({'*': P('x',)})")
def a_spec_for_rules(at):
    Plan(P("x"))


@mistake(
    iso.PlanError,
    "rules are a mapping, or pairs, of name patterns and specs",
    "Plan({'*': P('x',)})",
)
def a_set_for_rules(at):
    Plan({"weight", "bias"})


@mistake(iso.PlanError, "'re:a.(' is no regular expression", "names, globs or 're:..'")
def a_regular_expression_that_is_none(at):
    Plan({"re:a.(": P("x")})


@mistake(iso.PlanError, "could take for ever", "write a glob")
def a_regular_expression_that_never_ends(at):
    Plan({"re:(a+)+b": P("x")})


@mistake(iso.PlanError, "'w' is given twice", "patterns of a plan are names, globs")
def a_pattern_twice(at):
    Plan([("w", P("x")), ("w", P("y"))])


@mistake(
    iso.PlanError,
    "w: 'embed' is neither a logical axis of the plan ('mlp') nor a mesh axis ('x', 'y')",
    "add it to axes",
)
def a_logical_axis_in_no_table(at):
    Plan({"w": ("embed",)}, axes={"mlp": "x"}).resolve({"w": (8, 8)}, at.mesh)


@mistake(iso.PlanError, "says nothing of inputs", "Plan(.., inputs=P(..))")
def inputs_of_a_plan_without(at):
    Plan({"*": None}).for_inputs()


@mistake(iso.PlanError, "carries no tensor-parallel plan", "Plan.tensor_parallel(axis")
def plan_of_a_model_that_carries_none(at):
    Plan.from_hf_tp_plan(linear())


@mistake(iso.PlanError, "'colwize'", "the known ones are", "colwise")
def a_style_that_is_misspelt(at):
    Plan.from_hf_tp_plan({"layers.*.q": "colwize"})


@mistake(iso.PlanError, "weights is 'out_in' or 'in_out'", "'in'")
def weights_in_another_order(at):
    Plan.tensor_parallel("x", weights="in")


@mistake(
    iso.PlanError, "w: the factors of the plan disagree", "Give each factor mesh axes of its own"
)
def factors_that_disagree(at):
    (Plan({"w": P("x")}) * Plan({"w": P(None, "x")})).resolve({"w": (8, 8)}, at.mesh)


@mistake(iso.ShardingError, "'hots'", "pinned_host")
def a_memory_that_no_device_has(at):
    iso.shard(flax_linear(), at.mesh, Plan({"*": None}, memory={"*": "hots"}))


@mistake(TypeError, "a plan", "create_opt_state(tx, params, mesh, plan)")
def optimizer_state_without_a_plan(at):
    create_opt_state(optax.adam(0.1), jax.tree.map(np.asarray, {"w": np.ones(8)}), at.mesh)


@mistake(
    iso.PlanError,
    "weight: spec ('x', Ellipsis) does not fit",
    "The mesh axes are 'x' (2), 'y' (4): name them",
)
def a_parameter_left_to_the_compiler(at):
    iso.shard(linear(), at.mesh, Plan({"weight": ("x", ...), "*": None}))


@mistake(iso.ShardingError, "no mesh axis is called 'z'", "'x' (2), 'y' (4)")
def activations_over_an_axis_that_the_mesh_lacks(at):
    plan = Plan({"*": None}, activations={"*": P("z")})
    xs.constrain_activations(linear(), at.mesh, plan)


@mistake(
    iso.PlanError,
    "no activation rule of the plan matches a module of Sequential",
    "its modules are '', 'mlp'",
)
def activations_of_a_module_that_is_misspelt(at):
    model = torch.nn.Sequential()
    model.add_module("mlp", linear())
    plan = Plan({"*": None}, activations={"mpl": P("x")})
    xs.constrain_activations(model, at.mesh, plan)
