"""Weights from files straight to shards: every device's memory is filled from its own bytes.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.weights.safetensors_writing import save_safetensors
>>> files = save_safetensors("model", {"up.weight": np.ones((16, 4), np.float32)})
>>> mesh = make_mesh((8,), ("x",))
>>> load_safetensors("model", mesh, Plan({"*.weight": ("x", None)}))["up.weight"].sharding.spec
P('x',)

Under the names and with the axes of another framework, by the rules of a `WeightMap`:

>>> from isoshard.core.weights.standard_layers import flax_names
>>> like = {"up": {"kernel": jax.ShapeDtypeStruct((4, 16), "float32")}}
>>> params = load_safetensors("model", mesh, (None, "x"), weights=flax_names(), like=like)
>>> params["up"]["kernel"].sharding.shard_shape((4, 16))
(4, 2)

On CPU devices a file is read into the memory of the arrays. Elsewhere the memory goes to the device
as soon as a weight is complete. In addition each reading thread has memory for a chunk. A process
reads only the shards of its own devices, and communicates with no other.

Rules cost no copy: they decide which bytes go where.

The library `safetensors` is not used: it reads slices into memory of its own, which is not aligned
as XLA shares it, so that each would be copied once more, and its NumPy side has no float8.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.plan.unused_rules import warn_unused
from isoshard.core.transfer.device_dtypes import device_dtype
from isoshard.core.transfer.host_memory import ALIGNMENT, aligned_empty, host_slices

from .file_format import Stored
from .folder import open_weights
from .matching import RuleGroup
from .ops import WaitingMemory
from .progress import Progress, shown
from .reading import Job, read_all
from .weight_errors import WeightError, raise_listed
from .weight_map import WeightMap, filled
from .weight_rules import Rule

CHUNK = 16 << 20  # bytes


def load_safetensors(
    path: str | Path,
    mesh: Mesh,
    plan: Any,
    *,
    weights: WeightMap | None = None,
    like: Any = None,
    dtype: Any = None,
    progress: bool | Progress = False,
    threads: int = 4,
    chunk: int = CHUNK,
) -> Any:
    """Load a safetensors file or folder, each device its own shards.

    Args:
        path: a `.safetensors` file, a folder with one, or a folder (or file) with an index.
        mesh: the mesh, or what `as_mesh` takes.
        plan: a `Plan`, one spec for all, or a dictionary of specs by name; by the names that the
            results have.
        weights: rules from the names in the files to other names and axes. Not given: names and
            axes as in the files.
        like: the result's structure, a pytree of arrays or shapes (`jax.eval_shape(init)`): names
            and shapes are compared, and floats come in its dtypes. Of a torch module (one on
            `meta` will do) the weights come by name.
        dtype: for all floats; integers and bools keep theirs.
        progress: True shows a bar. A function is called with the bytes read and those to be read.
        threads: that read at the same time.
        chunk: the most bytes that each of them has in flight.

    Returns:
        The weights by name, or `like` with the weights in it. Names that `save_safetensors` noted
        as tied share one array.

    Raises:
        FileFormatError: a file is damaged, truncated, or leads out of its folder.
        FileNotFoundError: there is no such file.
        WeightError: listing every weight that does not fit the rules or `like`.
        ShardingError: listing every weight that the plan does not fit, or that has no dtype on
            devices.
        ValueError: `threads` or `chunk` is too small.
        TypeError: `dtype` is no float dtype.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.weights.safetensors_writing import save_safetensors
        >>> _ = save_safetensors("small", {"w": np.ones((8, 4), np.float32)})
        >>> load_safetensors("small", make_mesh((8,), ("x",)), ("x",), dtype="bfloat16")["w"].dtype
        dtype(bfloat16)
    """
    mesh = as_mesh(mesh)
    if threads < 1 or chunk < 1 << 12:
        raise ValueError(f"threads={threads} must be 1 or more, and chunk={chunk} 4096 or more")
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype is what floats become, and {dtype} is no float dtype")
    catalogue = open_weights(path)
    stored = catalogue.tensors
    targets, unchanged = _targets(stored, catalogue.tied, weights, like, dtype)
    shardings = _shardings(targets, mesh, plan)
    jobs = [target.job(shardings[name]) for name, target in targets.items() if not target.same]
    with shown(progress, sum(job.nbytes for job in jobs), Path(path).name) as report:
        arrays = read_all(jobs, threads, chunk, report)
    for name, target in targets.items():
        if target.same:
            arrays[name] = _resharded(arrays[target.same], shardings[name])
    results = {**{name: arrays[name] for name in targets}, **unchanged}
    return results if like is None else filled(like, results)


@dataclasses.dataclass(frozen=True)
class _Target:
    """A weight to be loaded.

    Attributes:
        name: what it is called.
        shape: of the global weight.
        dtype: on the devices.
        blocks: of the sources, that memory at a start waits for.
        stored: the sources in the files.
        same: the name of the weight that this one is, if it is tied; else "".
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Callable[[tuple[int, ...], np.ndarray], Sequence[tuple[str, WaitingMemory]]]
    stored: Mapping[str, Stored]
    same: str = ""

    def job(self, sharding: NamedSharding) -> Job:
        """What is to be read for this weight."""
        return Job(self.name, self.shape, self.dtype, sharding, self._requests)

    def _requests(self, sharding: NamedSharding) -> Any:
        """Memory for each block of this process's devices, and the ranges of files that fill it."""
        starts = list(dict.fromkeys(block.start for block in host_slices(sharding, self.shape)))
        shape = sharding.shard_shape(self.shape)
        blocks = dict(zip(starts, _aligned(len(starts), shape, self.dtype), strict=True))
        requests: dict[Stored, list[Any]] = {}
        for at, memory in blocks.items():
            if not memory.size:
                continue
            start = (*at, *(0,) * (len(self.shape) - len(at)))
            for name, block in self.blocks(start, memory):
                if block.view.size:
                    requests.setdefault(self.stored[name], []).append((block.start, block.view))
        return blocks, requests


def _targets(
    stored: Mapping[str, Stored],
    tied: Mapping[str, str],
    weights: WeightMap | None,
    like: Any,
    dtype: Any,
) -> tuple[dict[str, _Target], dict[str, Any]]:
    """The weights to be loaded by name, and those of `like` that rules keep."""
    shapes = {name: jax.ShapeDtypeStruct(s.shape, s.dtype) for name, s in stored.items()}
    shapes |= {name: shapes[first] for name, first in tied.items()}
    sources = {**stored, **{name: stored[first] for name, first in tied.items()}}
    matching, like_leaves = (weights or _SAME).match(shapes, like)
    errors = list(matching.errors)
    targets: dict[str, _Target] = {}
    unchanged: dict[Any, str] = {}
    for group in matching.groups:
        try:
            source = _common_dtype(group, sources)
        except WeightError as error:
            errors.append(str(error))
            continue
        for name, shape in group.shapes.items():
            want = getattr((like_leaves or {}).get(name), "dtype", None)
            try:
                kind = _dtype_of(name, source.dtype, dtype, want)
            except (WeightError, ShardingError) as error:
                errors.append(str(error))
                continue
            plain = not group.rule.ops and not group.rule.stack
            same = unchanged.setdefault((source.name, kind), name) if plain else name
            targets[name] = _Target(
                name,
                shape,
                kind,
                lambda start, view, group=group, name=name: group.blocks(name, start, view),
                sources,
                "" if same == name else same,
            )
    errors += [
        f"{name}: the rules keep it, and like has only its shape"
        for name in matching.kept
        if like_leaves is not None and isinstance(like_leaves[name], jax.ShapeDtypeStruct)
    ]
    fix = "Add a rule for each: load_safetensors(.., weights=iso.weights.WeightMap([Rule(..)]))."
    raise_listed("the files do not fit like and the rules", errors, fix=fix)
    return targets, {name: (like_leaves or {})[name] for name in matching.kept}


def _aligned(count: int, shape: tuple[int, ...], dtype: np.dtype) -> list[np.ndarray]:
    """Memory for blocks of one array, at once: the system allocates large memory faster."""
    size = math.prod(shape) * dtype.itemsize
    step = -(-size // ALIGNMENT) * ALIGNMENT
    memory = aligned_empty((count * step,), np.uint8)
    blocks = [memory[i * step : i * step + size] for i in range(count)]
    return [block.view(dtype).reshape(shape) for block in blocks]


def _common_dtype(group: RuleGroup, stored: Mapping[str, Stored]) -> Stored:
    """A source of a group, all of which have one dtype."""
    sources = [stored[name] for names in group.sources for name in names]
    kinds = sorted({source.dtype.name for source in sources})
    if len(kinds) > 1:
        names = ", ".join(name for layer in group.sources for name in layer)
        raise WeightError(f"{names}: dtypes {', '.join(kinds)} differ")
    return sources[0]


def _dtype_of(name: str, stored: np.dtype, dtype: Any, like_dtype: Any) -> np.dtype:
    """A weight's dtype on devices: floats get `dtype`, or that of `like`."""
    floats = jnp.issubdtype(stored, jnp.floating)
    if floats and dtype is not None:
        return device_dtype(jnp.dtype(dtype), name)
    if like_dtype is None:
        return device_dtype(stored, name)
    want = jnp.dtype(like_dtype)
    if want == stored or (floats and jnp.issubdtype(want, jnp.floating)):
        return device_dtype(want, name)
    if floats or want != device_dtype(stored, name):
        raise WeightError(f"{name}: is {stored} in the file, and {want} in like")
    return want


def _shardings(targets: Mapping[str, _Target], mesh: Mesh, plan: Any) -> dict[str, NamedSharding]:
    shapes = {
        name: jax.ShapeDtypeStruct(target.shape, target.dtype) for name, target in targets.items()
    }
    if isinstance(plan, Plan):
        warn_unused(plan, shapes)
        return plan.resolve(shapes, mesh).shardings
    if isinstance(plan, dict):
        odd = [f"{name}: no spec" for name in shapes if name not in plan]
        odd += [f"{name}: a spec, and no such weight" for name in plan if name not in shapes]
        raise_listed("the specs do not match the weights", odd)
    shardings, errors = {}, []
    for name, shape in shapes.items():
        spec = plan[name] if isinstance(plan, dict) else plan
        try:
            rank = len(shape.shape)
            shardings[name] = named_sharding(spec, mesh, rank, shape=shape.shape, name=name)
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return shardings


def _resharded(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A tied weight: the same array, unless the plan shards it differently."""
    return array if array.sharding == sharding else jax.device_put(array, sharding)


_SAME = WeightMap([Rule("{name*}", "{name*}")])
