"""What isoshard uses of JAX that has no public name: all of it, and nowhere else.

Each name is one row of a table (`private_names`), with why it is used and what happens in a JAX
without it. `docs/compatibility.md` is made of the rows, and
`tests/core/runtime/test_jax_internals.py` calls each as isoshard does.

| module | of |
|---|---|
| this one | devices, processes, the compiler |
| `tracers` | values of a function that is traced |
| `jaxpr_classes` | traced programs: 40 ms, so `import isoshard` leaves it out |
| `primitive_rules` | what a primitive does |
| `meshes` | the order of devices |
| `compilation` | operators that split themselves, the cache on disk, passes of the compiler |
| `undocumented` | names without an underscore that are not in JAX's documentation |

>>> devices_have_started() in (True, False)
True
>>> "jax._src.distributed.global_state" in [row.path for row in NAMES]
True
"""

from __future__ import annotations

if __name__ != "isoshard.core.runtime._jax_internals":
    raise ImportError(f"import isoshard.core.runtime._jax_internals, not {__name__}")

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
from jax.sharding import Mesh, Sharding

from isoshard.core.errors import PrivateNameError

from .declared import NAMES as NAMES

if TYPE_CHECKING:
    from jax.extend.core import Primitive  # 40 ms, with Pallas

devices_have_started: Callable[[], bool] = NAMES.bind(
    "jax._src.xla_bridge.backends_are_initialized",
    why="tells whether JAX has started its devices, without starting them",
    without="`iso.distributed.init_distributed` raises",
)


def _is_distributed() -> bool:
    try:
        return distributed_state.client is not None
    except PrivateNameError:
        return jax.process_count() > 1  # the last that is left: it starts the devices


is_distributed: Callable[[], bool] = NAMES.bind(
    "jax.distributed.is_initialized",
    otherwise=_is_distributed,
    why="tells whether this process has joined others",
    without="nothing changes: the client of the coordination service tells it",
)

distributed_state: Any = NAMES.bind(
    "jax._src.distributed.global_state",
    why="has the client, the address and the ranks of JAX's coordination service",
    without="runs of several processes raise when they talk to each other",
)

_parse: Callable[..., Any] = NAMES.bind(
    "jax._src.sharding_impls.parse_flatten_op_sharding",
    why="says a layout that XLA chose in the names of a mesh",
    without="operators that split themselves (attention, Fourier transforms) raise on a mesh",
)

_tiles_of: Callable[[Any], Any] = NAMES.field(
    "jax._src.sharding_impls.GSPMDSharding._hlo_sharding",
    why="is the layout that XLA chose for an operand of such an operator",
    without="as without parse_flatten_op_sharding",
)

_asking_for_devices: set[Any] = NAMES.bind(
    "jax._src.dispatch.prim_requires_devices_during_lowering",
    otherwise=set(),
    why="lists the primitives whose lowering receives the devices",
    without="Fourier transforms and programs in blocks raise where they are compiled on a mesh",
)

_traceback_limit: Any = NAMES.bind(
    "jax._src.config.traceback_in_locations_limit",
    why="leaves the lines of source out of what is compiled in one thread",
    without="XLA may compile for ever where such an operator is split",
)

_kinds_of_values: Any = NAMES.bind(
    "jax._src.core.pytype_aval_mappings",
    otherwise={},
    why="lets JAX say what to do with a torch tensor that it was given",
    without="JAX says that it cannot interpret the tensor as an abstract array",
)

_nameless_key: Any = NAMES.bind(
    "jax._src.config.remove_custom_partitioning_ptr_from_cache_key",
    otherwise=lambda _remove: contextlib.nullcontext(),
    why="leaves an address out of the key of JAX's compilation cache",
    without="programs with such operators are compiled anew in each process",
)

CLUSTERS: dict[str, Any] = {
    name: NAMES.bind(
        f"jax._src.clusters.{name}",
        otherwise=None,
        why=f"tells the number of a process and the coordinator {where}",
        without=(
            "as where JAX is not at home: `iso.distributed.init_distributed` warns, or says what "
            "to set"
        ),
    )
    for name, where in (
        ("OmpiCluster", "below Open MPI's mpirun"),
        ("SlurmCluster", "below SLURM's srun"),
        ("Mpi4pyCluster", "below an MPI, where mpi4py is installed"),
        ("GkeTpuCluster", "on Cloud TPU under GKE"),
        ("GceTpuCluster", "on a Cloud TPU pod slice"),
        ("K8sCluster", "in a Job of Kubernetes"),
    )
}


def layout_entries(layout: Sharding, mesh: Mesh) -> tuple[Any, ...]:
    """The axes of a mesh in a layout that the compiler chose.

    Args:
        layout: of an operand, as XLA's partitioner hands it to `custom_partitioning`.
        mesh: whose axes are wanted.

    Returns:
        The entries of a PartitionSpec; those at its end may be left out.

    Raises:
        ValueError, KeyError, AssertionError: JAX's three ways to say that the mesh has none.
    """
    return tuple(_parse(_tiles_of(layout), mesh)[0])


def without_locations() -> None:
    """Let what this thread traces from now on name no lines of source."""
    _traceback_limit.set_local(0)


def no_locations() -> contextlib.AbstractContextManager[Any]:
    """Context in which what this thread lowers names no lines of source."""
    return _traceback_limit(0)


def cached_without_addresses() -> contextlib.AbstractContextManager[Any]:
    """Context in which the address of an operator is no part of a compiled program's key."""
    return _nameless_key(True)


def reject_values(kind: type, reject: Callable[[Any], NoReturn]) -> None:
    """Say what is wrong where JAX is given a value of a class that it does not know.

    Args:
        kind: the class, with its subclasses.
        reject: raises the error, which is no TypeError: JAX has words of its own for these.
    """
    _kinds_of_values[kind] = reject


def needs_devices(primitive: Primitive) -> None:
    """Have the lowering of a primitive told the devices of the program."""
    _asking_for_devices.add(primitive)
