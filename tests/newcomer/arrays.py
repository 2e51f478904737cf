"""Mistakes with arrays, meshes and specs: a user of JAX in the first hour."""

import jax
import jax.numpy as jnp
import numpy as np

import isoshard as iso
from isoshard import P

from .mistakes import mistake

ROWS = np.ones((8, 4), np.float32)


@mistake(iso.SpecError, "no mesh axis is called 'z'", "The mesh axes are 'x' (2), 'y' (4)")
def spec_of_an_axis_that_the_mesh_lacks(at):
    iso.shard(ROWS, at.mesh, P("z"))


@mistake(iso.SpecError, "'x' is used 2 times", "The mesh axes are")
def one_mesh_axis_twice(at):
    iso.shard(ROWS, at.mesh, P("x", "x"))


@mistake(iso.SpecError, "w: ", "3 entries", "rank 2")
def more_entries_than_axes(at):
    iso.shard(ROWS, at.mesh, P("x", None, "y"), name="w")


@mistake(iso.SpecError, "there is no mesh axis 7", "give their indices 0..1")
def index_of_an_axis_that_the_mesh_lacks(at):
    iso.shard(ROWS, at.mesh, (7, None))


@mistake(iso.SpecError, "'rows'", "'x' (2), 'y' (4)")
def a_string_for_a_spec(at):
    iso.shard(ROWS, at.mesh, "rows")


@mistake(iso.UnevenError, "axis 0 has size 6", "Pad it to 8")
def an_axis_that_does_not_divide(at):
    iso.shard(np.ones((6, 4), np.float32), at.mesh, P("y"))


@mistake(iso.ShardingError, "2 leaves cannot be laid out", "nothing was changed", "a.w", "a.b")
def several_leaves_at_once(at):
    iso.shard({"a": {"w": ROWS[:7], "b": np.ones(3, np.float32)}}, at.mesh, P("x"))


@mistake(TypeError, "how is it to lie over the mesh", "P() for whole copies")
def no_spec(at):
    iso.shard(ROWS, at.mesh)


@mistake(iso.ShardingError, "no mesh", "jax.set_mesh")
def no_mesh_and_none_is_set(at):
    iso.shard(ROWS, P("x"))


@mistake(TypeError, "a mesh", "iso.make_mesh")
def spec_before_mesh(at):
    iso.shard(ROWS, P("x"), at.mesh)


@mistake(TypeError, "a mesh", "iso.make_mesh")
def a_shape_for_a_mesh(at):
    iso.shard(ROWS, (2, 4), P("x"))


@mistake(TypeError, "array is a str", "iso.load_safetensors")
def a_string_for_an_array(at):
    iso.shard("weights.npy", at.mesh, P("x"))


@mistake(iso.CopyError, "array: JAX has no dtype object", "Convert it with .astype(..)")
def an_array_of_objects(at):
    iso.shard(np.array([object(), None]), at.mesh, P())


@mistake(iso.SpecError, "the tree of specs does not match", "no spec for b", "a Plan")
def tree_of_specs_without_a_leaf(at):
    iso.shard({"a": ROWS, "b": ROWS}, at.mesh, {"a": P("x")})


@mistake(iso.CopyError, "float64 is stored as float32", "Pass copy=None or copy=True")
def no_copy_of_float64(at):
    iso.shard(np.ones((8, 4)), at.mesh, P("x"), copy=False)


@mistake(iso.CopyError, "2147483647", "jax_enable_x64")
def an_integer_that_does_not_fit(at):
    iso.shard(np.array([2**40, 1]), at.mesh, P("x"))


@mistake(iso.DeviceError, "needs 16 devices, there are 8", "iso.simulate_devices(16)")
def a_mesh_larger_than_the_machine(at):
    iso.make_mesh((4, 4), ("x", "y"))


@mistake(iso.ShardingError, "shape (2, 4)", "names ('x',)", "one name")
def fewer_names_than_axes(at):
    iso.make_mesh((2, 4), ("x",))


@mistake(iso.ShardingError, "name 'x' is used 2 times", "make_mesh((2, 4), ('x', 'y'))")
def one_name_for_two_axes(at):
    iso.make_mesh((2, 4), ("x", "x"))


@mistake(iso.ShardingError, "the shape of a mesh is a tuple", "iso.make_mesh((8,), ('x',))")
def a_number_for_a_shape(at):
    iso.make_mesh(8, "x")


@mistake(iso.DeviceError, "already running on 8 cpu devices", "first in a new process")
def simulated_devices_too_late(at):
    iso.simulate_devices(16)


@mistake(iso.ShardingError, "uneven is 'error' or 'pad'", "'chunk'")
def uneven_by_another_word(at):
    iso.shard(ROWS, at.mesh, P("x"), uneven="chunk")


@mistake(iso.ShardingError, "sizes", "uneven='pad'")
def sizes_without_padding(at):
    iso.shard(ROWS, at.mesh, P("x"), sizes=(5, 3))


@mistake(iso.UnevenError, "axis 0 is given 9 elements, and has 8", "Give one size per block")
def sizes_that_do_not_add_up(at):
    iso.shard(ROWS, at.mesh, P("x"), uneven="pad", sizes=(5, 4))


@mistake(iso.ShardingError, "'gpu_host'", "pinned_host")
def a_memory_that_devices_lack(at):
    iso.shard(ROWS, at.mesh, P("x"), memory="gpu_host")


@mistake(TypeError, "an UnevenArray has padding", "iso.domain.lift(f)", "iso.full(u)")
def arithmetic_on_blocks(at):
    iso.shard(ROWS[:7], at.mesh, P("x"), uneven="pad") + 1


@mistake(AttributeError, "an UnevenArray has no 'sum'", "iso.domain.lift(f)", "iso.full(u)")
def a_method_of_blocks(at):
    iso.shard(ROWS[:7], at.mesh, P("x"), uneven="pad").sum()


@mistake(TypeError, "an UnevenArray has padding", "iso.domain.lift(f)", "iso.full(u)")
def numpy_on_blocks(at):
    jnp.sum(iso.shard(ROWS[:7], at.mesh, P("x"), uneven="pad"))


@mistake(TypeError, "full takes arrays that lie on devices", "ndarray", "iso.shard(x, mesh, spec)")
def gather_what_is_in_host_memory(at):
    iso.full(ROWS)


@mistake(TypeError, "sharding_of takes arrays that lie on devices", "iso.shard(x, mesh, spec)")
def layout_of_host_memory(at):
    iso.sharding_of(ROWS)


@mistake(iso.ShardingError, "a traced value on Auto axes has no layout yet", "iso.shard")
def layout_of_a_traced_value(at):
    jax.jit(lambda x: iso.sharding_of(x) and x)(iso.shard(ROWS, at.mesh, P("x")))


@mistake(iso.ShardingError, "jax.shard_map", "in_specs")
def shard_inside_shard_map(at):
    inside = jax.shard_map(
        lambda x: iso.shard(x, at.mesh, P("x")), mesh=at.mesh, in_specs=P("x"), out_specs=P("x")
    )
    inside(iso.shard(ROWS, at.mesh, P("x")))


@mistake(iso.SpecError, "names no devices", "visualize(.., mesh=..)")
def picture_of_a_spec_alone(at):
    iso.visualize(P("x"))


@mistake(TypeError, "cannot draw a builtin_function", "laid out by isoshard.shard")
def picture_of_a_function(at):
    iso.visualize(print)


@mistake(TypeError, "cannot draw a ndarray", "laid out by isoshard.shard")
def picture_of_host_memory(at):
    iso.visualize(ROWS)


@mistake(iso.SpecError, "'{devices=[2,1]0'", "it must stand in braces, like '{replicated}'")
def op_sharding_that_is_cut_off(at):
    iso.parse_op_sharding("{devices=[2,1]0")


@mistake(
    AttributeError, "'isoshard' has no attribute 'visualise'", "did you mean isoshard.visualize?"
)
def a_name_that_is_misspelt(at):
    _ = iso.visualise
