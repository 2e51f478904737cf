"""The shardings of a JAX function: of its weights, its inputs, and the values inside.

A plan decides about weights and inputs. Without one an input is sharded by the `in_shardings` of
the outermost `jit`, else as the array itself is; an array on one device has no sharding to write.

>>> import jax
>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from .flat_programs import flat_program
>>> from .jax_functions import split_function
>>> mesh = make_mesh((8,), ("data",))
>>> double = jax.jit(lambda x: 2 * x, out_shardings=NamedSharding(mesh, P("data")))
>>> taken = split_function(double, (jnp.ones(8),))
>>> program = flat_program(taken.function, [jnp.ones(8)])
>>> mesh_for(None, taken, program) == mesh
True
>>> _of_values(program, ["output", "output"], mesh)
{'output': P('data',)}
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Plan, ShardingError, as_mesh, entries_of, meshes, opened

from ..annotating import weight_layouts
from ..errors import AnnotationError, AnnotationWarning
from ..reading.graph import Graph
from .flat_programs import FlatProgram
from .jax_functions import SplitFunction


def mesh_for(mesh: Mesh | None, taken: SplitFunction, program: FlatProgram) -> Mesh:
    """The mesh of an export: the argument, that of the first sharding, or the ambient one."""
    if mesh is not None:
        return as_mesh(mesh)
    for layout in _layouts(taken, program):
        if isinstance(layout, NamedSharding) and isinstance(layout.mesh, Mesh):
            return layout.mesh
    if not (ambient := meshes.get_mesh()).empty:
        return ambient
    raise ShardingError(
        f"{taken.name} has no shardings, and there is no plan: pass a mesh and a plan, "
        "export_jax(fn, args, iso.make_mesh(shape, names), plan)"
    )


def specs_for(
    taken: SplitFunction,
    program: FlatProgram,
    plan: Plan | None,
    graph: Graph,
    mesh: Mesh,
    names: Sequence[str],
) -> dict[str, P]:
    """Find the specs of weights, inputs, results and values inside."""
    if plan is None:
        weights = _of_leaves(taken.weights, 0, program, mesh)
    else:
        weights = (
            weight_layouts.ruled_specs(plan.resolve(taken.model, mesh)) if taken.weights else {}
        )
    inputs = _of_leaves(taken.inputs, len(taken.weights), program, mesh)
    if plan is not None:
        inputs |= weight_layouts.of_inputs(plan, graph, mesh)
    return {**weights, **inputs, **_of_values(program, names, mesh)}


def _layouts(taken: SplitFunction, program: FlatProgram) -> Iterator[Any]:
    yield from map(_leaf_sharding, (*taken.weights.values(), *taken.inputs.values()))
    yield from program.input_layouts.values()
    yield from program.layouts


def _leaf_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _of_leaves(
    leaves: Mapping[str, Any], first: int, program: FlatProgram, mesh: Mesh
) -> dict[str, P]:
    """The specs of arrays, from the outermost `jit` or from the arrays themselves."""
    specs = {}
    for at, (name, leaf) in enumerate(leaves.items(), first):
        layout = program.input_layouts.get(at) or _leaf_sharding(leaf)
        if layout is not None:
            specs |= _spec_of(name, layout, leaf.ndim, mesh)
    return specs


def _of_values(program: FlatProgram, names: Sequence[str], mesh: Mesh) -> dict[str, P]:
    specs: dict[str, P] = {}
    atoms = opened(program.jaxpr).outvars[program.results :]
    for name, layout, atom in zip(names[program.results :], program.layouts, atoms, strict=True):
        specs |= _spec_of(name, layout, atom.aval.ndim, mesh)
    return specs


def _spec_of(name: str, layout: Any, ndim: int, mesh: Mesh) -> dict[str, P]:
    if not isinstance(layout, NamedSharding):
        raise AnnotationError(
            f"its layout is a {type(layout).__name__}; constrain it to a NamedSharding", tensor=name
        )
    if P.UNCONSTRAINED in entries_of(layout.spec):
        warnings.warn(
            f"{name}: {layout.spec} leaves an axis to the compiler, which a file cannot express; "
            "the value is left out",
            AnnotationWarning,
            stacklevel=4,
        )
        return {}
    try:
        return {name: weight_layouts.spec_over(layout, mesh, ndim)}
    except ShardingError as error:
        raise AnnotationError(str(error), tensor=name) from None
