"""Loader: batches of any source as sharded arrays, prefetched to devices.

>>> import numpy as np
>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> source = [{"x": np.ones((8, 4), np.float32), "y": np.arange(8)} for _ in range(3)]
>>> for batch in loader(source, mesh, P("data")):
...     print(batch["x"].sharding.spec, batch["y"].shape)
P('data',) (8,)
P('data',) (8,)
P('data',) (8,)

One thread reads the source and puts its batches on devices, each shard on its own, while the loop
computes. It waits when `prefetch` batches are ready. Batches are in the order of the source, and an
error of the source is raised in place of its batch. The thread ends with the epoch, with `close`,
and when the iterator is garbage collected (after `break`, for instance).

A source is anything that can be iterated: a list, a generator, a torch `DataLoader`, a grain
`DataLoader`, a `tf.data.Dataset`. A batch is a pytree of NumPy arrays, numbers, JAX arrays, torch
CPU tensors, or what NumPy takes for an array. A `DataLoader` with worker processes should start
them without a fork, which JAX warns of: `multiprocessing_context="forkserver"`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from isoshard.core.errors import ShardingError
from isoshard.core.frameworks import require
from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import is_spec
from isoshard.core.plan import Plan
from isoshard.core.plan.freezing import UNSET
from isoshard.core.runtime import metrics, samples

from .batch_lengths import FILL
from .batch_transfer import DeviceBatch, Placer
from .feed import Feed
from .ordered_queue import END, OrderedQueue

Last = Literal["error", "drop", "pad"]
_LASTS = ("error", "drop", "pad")


def loader(
    iterable: Iterable[Any],
    mesh: Mesh,
    spec: Any,
    *,
    prefetch: int = 2,
    last: Last = "error",
    mask: str | None = None,
    lengths: Sequence[int] | None = None,
    fill: Mapping[str, Any] | None = None,
    local: bool = False,
    framework: str = "jax",
    copy: bool | None = True,
    name: str | None = None,
) -> Loader:
    """Prefetch the batches of a source onto a mesh.

    Args:
        iterable: the source. Each iteration of the loader iterates it once.
        mesh: the mesh, or what `as_mesh` takes.
        spec: one spec for every array of a batch, a tree of them, or a `Plan`: its `inputs`, or,
            if it has none, its rules for the names in a batch.
        prefetch: the number of batches that may be ready on the devices ahead of the loop. 0 reads
            and transfers in the loop itself, without a thread.
        last: what to do with a batch whose rows (axis 0, where the spec splits it) do not split
            evenly. "error" raises; "drop" leaves it out if it is the last one and raises
            otherwise; "pad" repeats its rows, from the first on, up to the rows of the first
            batch, so that no second program is compiled.
        mask: with last="pad" and batches that are dictionaries, the key under which each gets an
            array of booleans: True for the rows that are no padding.
        lengths: to which the sequences of a batch are padded along axis 1, at their end: to the
            smallest that is enough, so that there is one program for each length. With
            local=True, the batches of all processes must need the same one.
        fill: with lengths, the names of the arrays that are padded, and the value for each. By
            default those of transformers: 0 for "input_ids", "attention_mask", "token_type_ids"
            and "position_ids", -100 for "labels".
        local: whether each process passes only its own rows of every batch, as for `from_local`.
            Otherwise each passes all of it, and transfers the shards of its devices.
        framework: of the batches' arrays: "jax", where 64-bit floats are rounded to 32 bits while
            `jax_enable_x64` is off, as by `jnp.asarray`; or "torch" for tensors on the device
            `jax`, where they raise then.
        copy: True copies, so the source may reuse its memory. None may share memory with the
            source on CPU devices; False shares or raises.
        name: of a batch, for messages.

    Returns:
        The loader. It can be iterated again if the source can.

    Raises:
        ShardingError: an option is invalid.
        ImportError: the framework is not installed.
        TypeError: the source cannot be iterated.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((8,), ("data",))
        >>> source = [{"x": np.arange(8)}, {"x": np.arange(3)}]
        >>> for batch in loader(source, mesh, P("data"), last="pad", mask="real"):
        ...     print(batch["x"], batch["real"].sum())
        [0 1 2 3 4 5 6 7] 8
        [0 1 2 0 1 2 0 1] 3
        >>> tokens = [{"input_ids": np.ones((8, n), int)} for n in (3, 7, 12)]
        >>> for batch in loader(tokens, mesh, P("data"), lengths=(8, 16)):
        ...     print(batch["input_ids"].shape)
        (8, 8)
        (8, 8)
        (8, 16)
    """
    wrong = []
    if not isinstance(prefetch, int) or prefetch < 0:
        wrong.append(f"prefetch={prefetch!r} is no number of batches; give 0 or more")
    if last not in _LASTS:
        wrong.append(f"last={last!r} is none of 'error', 'drop' and 'pad'")
    if mask is not None and last != "pad":
        wrong.append(f"mask={mask!r} masks padded rows, and needs last='pad'")
    if fill is not None and lengths is None:
        wrong.append("fill= pads sequences, and needs lengths=")
    sizes = () if lengths is None else tuple(sorted(lengths))
    if lengths is not None and not all(
        isinstance(size, int) and size > 0 for size in sizes or (0,)
    ):
        wrong.append(f"lengths={lengths!r} are no lengths of sequences; give integers above 0")
    if framework not in ("jax", "torch"):
        wrong.append(f"framework={framework!r} is neither 'jax' nor 'torch'")
    if wrong:
        raise ShardingError(f"the options of the loader are invalid: {'; '.join(wrong)}")
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"a loader takes an iterable of batches, not a {type(iterable).__name__}")
    if framework != "jax":
        require(framework)
    if isinstance(spec, Plan) and any(factor.inputs is not UNSET for factor in spec.factors):
        spec = spec.for_inputs()
    options = {"last": last, "mask": mask, "local": local, "copy": copy}
    options |= {"lengths": sizes, "fill": FILL if fill is None else fill}
    options |= {"name": name or "batch", "exact": framework != "jax"}
    return Loader(iterable, as_mesh(mesh), spec, prefetch, framework, options)


class Loader:
    """Batches of a source on a mesh; created by `loader`.

    Attributes:
        source: the iterable that it reads.

    Example:
        >>> import jax, numpy as np
        >>> batches = loader([np.ones(8)] * 3, jax.make_mesh((8,), ("data",)), ("data",))
        >>> batches, len(batches)
        (<loader of a list by ('data',), prefetch=2>, 3)
    """

    def __init__(
        self,
        source: Iterable[Any],
        mesh: Mesh,
        spec: Any,
        prefetch: int,
        framework: str,
        options: dict[str, Any],
    ):
        """Use `loader`, which checks."""
        self.source = source
        self._mesh = mesh
        self._spec = spec
        self._prefetch = prefetch
        self._framework = framework
        self._options = options

    def __iter__(self) -> Batches:
        """Begin an epoch; reading begins at once."""
        where = metrics.user_location()
        placer = Placer(self._mesh, self._spec, where=where, **self._options)
        return Batches(iter(self.source), placer, self._prefetch, self._framework)

    def __len__(self) -> int:
        """Batches of one epoch as the source counts them, including one that is dropped."""
        sized: Any = self.source
        return len(sized)

    def __repr__(self) -> str:
        """The type of the source, and the spec."""
        spec = self._spec if is_spec(self._spec) else type(self._spec).__name__
        return f"<loader of a {type(self.source).__name__} by {spec}, prefetch={self._prefetch}>"


class Batches(Iterator[Any]):
    """One epoch of a loader: an iterator that can be closed, and closes at the end of a `with`.

    Args:
        source: of the batches.
        placer: puts them on devices.
        prefetch: the number that may be ready; 0 for no thread.
        framework: of the arrays.

    Example:
        >>> import jax, numpy as np
        >>> batches = loader([np.ones(8)] * 3, jax.make_mesh((8,), ("data",)), ("data",))
        >>> with iter(batches) as epoch:                 # closed at the end: no thread remains
        ...     print(next(epoch).sharding.spec)
        P('data',)
    """

    def __init__(self, source: Iterator[Any], placer: Placer, prefetch: int, framework: str):
        """See the class; reading begins now."""
        self._placer = placer
        self._torch = require("torch") if framework == "torch" else None
        self._count = 0
        self._feed: Feed | None = None
        self._items: Generator[DeviceBatch, None, None] | None = None
        self._ready = OrderedQueue(prefetch)
        items = placer.run(source)
        if prefetch:
            self._feed = Feed(items, self._ready)
            weakref.finalize(self, self._feed.stop).atexit = False
        else:
            self._items = items

    def __iter__(self) -> Batches:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there are no more, or the iterator was closed.
            Exception: raised by the source or the transfer for this batch; the epoch is over then.
            DistributedError: another process has another number of batches, or of rows.
        """
        try:
            placed = self._take()
            if placed is END:
                self._placer.compare_end(self._count)
                raise StopIteration
            self._placer.compare(placed)
        except BaseException:
            self.close()
            raise
        self._count += 1
        metrics.count("data.batches")
        return placed.as_arrays() if self._torch is None else placed.as_framework(self._torch)

    def close(self) -> None:
        """End the thread, and wait until it has; a read in progress is finished first."""
        self._placer.closed = True
        if self._feed is not None:
            self._feed.close()
        items, self._items = self._items, None
        if items is not None:
            items.close()

    def __enter__(self) -> Batches:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _take(self) -> Any:
        if self._feed is None:
            return END if self._items is None else next(self._items, END)
        start = time.perf_counter()
        waits = self._ready.waits
        item = self._feed.take()
        if self._ready.waits > waits:
            metrics.count("data.waits")
            samples.observe("data.wait_seconds", time.perf_counter() - start)
        return item
