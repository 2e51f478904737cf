"""Saving a tree as a checkpoint: atomically, at once or in a thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from isoshard.core.errors import CheckpointError, ShardingError, raise_collected
from isoshard.core.frameworks import framework_of, require
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.processes.agreement import prepare_equal
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.core.runtime._jax_internals.undocumented import key_impl

from . import orbax_format, zarr_format
from .equal_across_ranks import save_lines
from .leaf_groups import Group, is_value, named_groups, nested
from .source import Entry
from .steps import MANIFEST, Steps
from .store import LocalStore, Sum, local
from .stored_shards import Content

_LOG = logging.getLogger(__name__)

_worker = concurrent.futures.ThreadPoolExecutor(1, "isoshard-checkpoint")
_pending: dict[str, list[Saving]] = {}
_lock = threading.Lock()


class Saving:
    """A checkpoint that is being written, or is complete.

    Attributes:
        step: of the checkpoint.
    """

    def __init__(self, step: int, future: concurrent.futures.Future[None]):
        """See `save`."""
        self.step = step
        self._future = future
        self._reported = False

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            OSError: the storage failed; the checkpoint was not written.
            CheckpointError: another process failed.
        """
        self._reported = True
        self._future.result()

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._future.done()


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    step: int = 0,
    keep: int = 0,
    asynchronous: bool = False,
    format: str = "zarr",
) -> Saving:
    """Save a tree as a checkpoint.

    Example:
        >>> import tempfile, isoshard as iso
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = iso.save(folder, {"w": np.ones(4), "epoch": 3})
        ...     iso.restore(folder, {"w": np.zeros(4), "epoch": 0})
        {'epoch': 3, 'w': array([1., 1., 1., 1.])}

    It is written under a temporary name and renamed once all is on the disk: a process killed at
    any moment leaves the older checkpoint complete. Each device's shard is read from its own
    buffer, and nothing is gathered. Several processes all call this with the same tree, and `path`
    is a folder that all of them see.

    Args:
        path: a folder of checkpoints; it is made if need be.
        tree: dictionaries, lists and pytrees of any kind, of either framework or both: arrays,
            tensors, modules and optimizers (by their own names), numbers and strings.
        step: at which it is taken; it names the checkpoint, and replaces that of the same name.
        keep: how many checkpoints remain, those saved last; 0 keeps all.
        asynchronous: copy everything to the host, and return while it is being written. Arrays may
            then be overwritten and donated.
        format: "zarr"; "torch", a folder that `torch.distributed.checkpoint` reads; or "orbax", one
            that Orbax and its `CheckpointManager` read.

    Returns:
        A handle with `wait()` and `done`. Errors of the background thread are raised by `wait`, at
        the latest by the next `save` to that path.

    Raises:
        TypeError: leaves cannot be saved; all are named.
        ValueError: two leaves have one name, or an argument is none of those above.
        ShardingError: leaves have no elements to save; all are named.
        CheckpointError: an earlier asynchronous save to `path` failed.
        DistributedError: the processes' arguments differ; the message lists them.
        OSError: the storage failed.

    Example of several steps, written in the background:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (10, 20, 30):
        ...         saving = iso.save(folder, {"w": np.ones(4)}, step=step, keep=2, asynchronous=True)
        ...     saving.wait()
        ...     iso.latest(folder), iso.restore(folder, {"w": np.zeros(4)}, step=20)["w"].sum()
        (30, np.float64(4.0))
    """  # noqa: E501
    group = ProcessGroup.world()
    prepare = functools.partial(_prepared, path, tree, step, keep, asynchronous, format)
    if group.size > 1:
        lines_of = functools.partial(save_lines, {"step": step, "keep": keep, "format": format})
        root, leaves = prepare_equal(
            "what iso.save is given", prepare, lambda prepared: lines_of(*prepared)
        )
    else:
        root, leaves = prepare()
    if asynchronous:
        leaves = leaves.copied()
    write = functools.partial(_write, root, step, keep, _FORMATS[format], leaves, group)
    return _start(root, step, write, asynchronous)


def _prepared(
    path: Any, tree: Any, step: int, keep: int, asynchronous: bool, format: str
) -> tuple[str, _Leaves]:
    """The folder and the leaves of a save, checked; nothing is written yet."""
    _check(step, keep, asynchronous, format)
    root = os.path.abspath(local(path))  # noqa: PTH100 (links stay as they are)
    if (Path(root) / MANIFEST).exists():
        raise ValueError(f"{root} is a checkpoint itself; give the folder that contains it")
    if format == "zarr":
        zarr_format.tensorstore()
    leaves = _leaves(*named_groups(tree))
    if format == "orbax":
        _check_orbax(leaves)
    return root, leaves


def _start(root: str, step: int, work: Callable[[], None], asynchronous: bool) -> Saving:
    """Run a save after earlier ones to the same path, now or in the thread."""
    with _lock:
        earlier = _pending.pop(root, [])
    if not asynchronous:
        concurrent.futures.wait([saving._future for saving in earlier])
    failed = [
        saving
        for saving in earlier
        if saving.done and saving._future.exception() and not saving._reported
    ]
    if failed:
        failures = "; ".join(
            f"step {saving.step}: {saving._future.exception()!r}" for saving in failed
        )
        raise CheckpointError(
            f"earlier checkpoints in {root} were not written, and no "
            f"wait() has raised their errors: {failures}"
        )
    if not asynchronous:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        work()
        done.set_result(None)
        return Saving(step, done)
    saving = Saving(step, _worker.submit(_logged, work, root, step))
    with _lock:
        _pending[root] = [*(other for other in earlier if not other.done), saving]
    return saving


def _logged(work: Callable[[], None], root: str, step: int) -> None:
    """Run a save, and log its error before `wait` raises it."""
    try:
        work()
    except BaseException as error:
        _LOG.error("the checkpoint of step %d in %s was not written: %r", step, root, error)
        raise


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """The leaves of a save.

    Attributes:
        contents: the arrays by name.
        values: numbers, strings and the like by name.
        same: other names of tied arrays, each with the name that is in `contents`.
        groups: the leaves of the tree.
        structure: the tree.
    """

    contents: dict[str, Content]
    values: dict[str, Entry]
    same: dict[str, str]
    groups: list[Group]
    structure: Any

    def copied(self) -> _Leaves:
        """The leaves copied to host memory, without the tree."""
        contents = {name: content.copied() for name, content in self.contents.items()}
        return dataclasses.replace(self, contents=contents, groups=[])


_Format = Callable[[LocalStore, str, _Leaves, ProcessGroup], dict[str, Sum]]


def _write(
    root: str, step: int, keep: int, form: _Format, leaves: _Leaves, group: ProcessGroup
) -> None:
    """Write and commit a checkpoint; all processes call this together."""
    store = LocalStore(root)
    steps = Steps(store)
    with contextlib.ExitStack() as stack:
        folder = group.broadcast(lambda: stack.enter_context(steps.saving(step)))
        files = form(store, folder, leaves, group)
        group.broadcast(lambda: steps.commit(folder, step, files))
    group.broadcast(lambda: steps.prune(step, keep))


def _write_zarr(
    store: LocalStore, folder: str, all_: _Leaves, group: ProcessGroup
) -> dict[str, Sum]:
    return zarr_format.write(store, folder, all_.contents, all_.values, all_.same, group)


def _write_torch(
    store: LocalStore, folder: str, all_: _Leaves, group: ProcessGroup
) -> dict[str, Sum]:
    leaves: dict[str, Any] = {name: (c.array, c.entry.dtype) for name, c in all_.contents.items()}
    leaves |= {name: leaves[other] for name, other in all_.same.items()}
    leaves |= {name: (entry.value, "") for name, entry in all_.values.items()}
    return require("torch").write_checkpoint(store.root, folder, leaves)


def _write_orbax(
    store: LocalStore, folder: str, all_: _Leaves, group: ProcessGroup
) -> dict[str, Sum]:
    leaves: dict[str, Any] = {name: entry.value for name, entry in all_.values.items()}
    leaves |= {name: content.logical() for name, content in all_.contents.items()}
    leaves |= {name: leaves[other] for name, other in all_.same.items()}
    tree = all_.structure.unflatten([nested(group, leaves) for group in all_.groups])
    root = Path(store.full_path(folder))
    orbax_format.write(root / orbax_format.ITEM, tree)
    files = [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()]
    return {name: Sum(store.size(f"{folder}/{name}"), None) for name in sorted(files)}


_FORMATS: dict[str, _Format] = {"zarr": _write_zarr, "torch": _write_torch, "orbax": _write_orbax}


def _leaves(groups: list[Group], structure: Any) -> _Leaves:
    """The leaves of a tree by name, not copied."""
    contents: dict[str, Content] = {}
    values: dict[str, Entry] = {}
    same: dict[str, str] = {}
    names_by_id: dict[int, str] = {}
    errors = []
    for name, state in (pair for group in groups for pair in group.named()):
        value = state.value
        if is_value(value):
            values[name] = Entry.of_value(value)
        elif id(value) in names_by_id:
            same[name] = names_by_id[id(value)]
        else:
            names_by_id[id(value)] = name
            try:
                contents[name] = _content(name, value)
            except ShardingError as error:
                errors.append(error)
    if errors:
        raise_collected(errors)
    return _Leaves(contents, values, same, groups, structure)


def _content(name: str, value: Any) -> Content:
    elements = value.array if isinstance(value, UnevenArray) else value
    if isinstance(elements, jax.ShapeDtypeStruct):
        raise ShardingError(f"{name} is only the shape of an array, and has no elements to save")
    framework = framework_of(value)
    if framework is not None:
        return Content.of(name, *framework.stored(value))
    dtype = value.dtype
    if isinstance(value, np.ndarray | np.generic):
        return Content.of(name, np.asarray(value), dtype.name)
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        impl = str(key_impl(elements))
        return Content.of(name, jax.random.key_data(elements), str(dtype), impl)
    return Content.of(name, value, str(dtype))


def _check(step: Any, keep: Any, asynchronous: bool, format: str) -> None:
    for name, value in (("step", step), ("keep", keep)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} is an integer of at least 0, not {value!r}")
    if format not in _FORMATS:
        raise ValueError(f"format is 'zarr', 'torch' or 'orbax', not {format!r}")
    if format != "zarr" and (asynchronous or jax.process_count() > 1):
        manager = {
            "torch": "isoshard.torch_bridge.checkpoints.CheckpointManager",
            "orbax": "Orbax's own CheckpointManager, which takes our arrays,",
        }
        raise ValueError(
            f"in the format {format!r} iso.save writes at once and from one process; "
            f"{manager[format]} does the rest"
        )


def _check_orbax(leaves: _Leaves) -> None:
    """Raise for leaves that Orbax's format cannot store."""
    wrong = [
        f"{name}: {type(entry.value).__name__}"
        for name, entry in leaves.values.items()
        if not isinstance(entry.value, bool | int | float | str)
    ]
    wrong += [
        f"{name}: blocks of unequal sizes"
        for name, content in leaves.contents.items()
        if isinstance(content.array, UnevenArray)
    ]
    wrong += [
        f"{name}: no elements, shape {content.entry.shape}"
        for name, content in leaves.contents.items()
        if content.entry.nbytes == 0
    ]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise TypeError(
            f"Orbax's format has arrays, numbers and strings, and not:{lines}\n"
            "Save without format='orbax', or leave them out."
        )
