"""Checkpoints by step: committed atomically, verified when they are restored."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import operator
import os
import threading
from typing import Any

from isoshard.core.checkpoint.steps import Steps
from isoshard.core.checkpoint.store import FsspecStore, LocalStore, Store
from isoshard.core.errors import CheckpointError
from isoshard.torch_bridge._torch_internals.checkpoint_types import STATE_DICT_TYPE

from . import protocol
from .preemption import Watch
from .save_planner import snapshot
from .torch_transport import process_groups

_LOG = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores checkpoints by step.

    A save that is interrupted, by whatever and wherever, leaves every earlier checkpoint as it was;
    what it left behind is ignored, and removed by the next manager. `restore` first compares every
    file with the checksums taken when it was written. The files of a step are in
    `torch.distributed.checkpoint`'s format. Room is needed for one checkpoint more than are kept.

    It can be used in a `with` statement, which ends with `close`.

    Args:
        path: a folder, or a URL for fsspec such as `"gs://bucket/run"`.
        save_interval: `save` and `save_async` take a checkpoint at multiples of this step.
        max_to_keep: how many checkpoints stay, those taken last; 0 keeps all. The others are
            removed when a new one is complete.
        max_pending_async: how many `save_async` may be under way; one more waits.
        num_of_threads: that write files.
        process_group: of the processes that save together. By default all processes of
            `torch.distributed`, if it is initialised; none is needed.
        chkpt_on_preemption: watch for SIGTERM, and take a checkpoint at the next step.

    Raises:
        ValueError: a number is not positive (`max_to_keep`: is negative).
        RuntimeError: `chkpt_on_preemption` outside the main thread.

    >>> import torch, isoshard.torch_bridge as xs
    >>> model = torch.nn.Linear(8, 8).to("jax")
    >>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
    >>> _ = xs.mark_sharding(model.weight, mesh, ("x", "y"))
    >>> with CheckpointManager("run", save_interval=10, max_to_keep=2) as manager:
    ...     saved = [manager.save_async(step, {"model": model.state_dict()}) for step in range(31)]
    ...     manager.join()
    ...     manager.restore(30, {"model": model.state_dict()})
    ...     saved.count(True), manager.all_steps()
    (4, [20, 30])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        num_of_threads: int | None = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ):
        """See the class."""
        self.base_path = os.path.join(os.fspath(path), "")  # noqa: PTH118 (it may be a URL)
        self.save_interval = _at_least(1, "save_interval", save_interval)
        self.max_to_keep = _at_least(0, "max_to_keep", max_to_keep or 0)
        self.num_of_threads = _at_least(1, "num_of_threads", num_of_threads)
        pending = _at_least(1, "max_pending_async", max_pending_async)
        self.chkpt_on_preemption = chkpt_on_preemption
        self._watch = Watch()
        self._warned = False
        if chkpt_on_preemption:
            self._watch.start()
        self._saving, self._training = process_groups(process_group)
        self._steps = Steps(store_at(path))
        self._training.broadcast(self._prepare_folder)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._free = threading.Semaphore(pending)
        self._pending: dict[concurrent.futures.Future[None], int] = {}

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due: at multiples of the interval, and when SIGTERM arrived.

        Args:
            step: of training, 0 or more.
        """
        step = _at_least(0, "step", step)
        self._raise_failures()
        preempted = self.chkpt_on_preemption and self.reached_preemption(step)
        if preempted and not self._warned:
            _LOG.warning("SIGTERM arrived: a checkpoint of step %d is due", step)
            self._warned = True
        return preempted or step % self.save_interval == 0

    def save(self, step: int, state_dict: STATE_DICT_TYPE, force: bool | None = False) -> bool:
        """Take a checkpoint if one is due, and wait until it is complete.

        Args:
            step: of training, 0 or more. Its older checkpoint, if there is one, is replaced.
            state_dict: nested; tensors on any device, and whatever can be pickled. Objects with a
                state dict of their own (modules, optimizers) may stand at its top level.
            force: take it even if none is due.

        Returns:
            Whether one was taken.

        Raises:
            CheckpointError: an earlier `save_async` failed.
            OSError: the storage refused something.
        """
        if not (self.should_save(step) or force):
            return False
        self._wait()
        self._save(operator.index(step), protocol.expanded(state_dict))
        return True

    def save_async(
        self, step: int, state_dict: STATE_DICT_TYPE, force: bool | None = False
    ) -> bool:
        """Take a checkpoint if one is due, and write it while training goes on.

        The state dict is copied to the host before this returns, so later changes are not in the
        checkpoint. Waits while `max_pending_async` others are being written. What goes wrong then
        is raised by whatever method is called next, at the latest by `join`.

        Args:
            step: as for `save`.
            state_dict: as for `save`.
            force: take it even if none is due.

        Returns:
            Whether one is being taken.

        Raises:
            CheckpointError: an earlier `save_async` failed.
        """
        if not (self.should_save(step) or force):
            return False
        step = operator.index(step)
        self._free.acquire()
        try:
            self._raise_failures()
            copied = snapshot(protocol.expanded(state_dict))
            future = self._worker.submit(self._save, step, copied)
        except BaseException:
            self._free.release()
            raise
        self._pending[future] = step
        future.add_done_callback(lambda _: self._free.release())
        return True

    def restore(self, step: int, state_dict: STATE_DICT_TYPE) -> None:
        """Fill a state dict from the checkpoint of a step.

        Every file is checked first: after an error nothing has changed. Tensors are filled in
        place, whatever layout they were saved with, and keep their own; other values are replaced
        in the state dict. Values of the checkpoint that the state dict does not have are left out.

        Args:
            step: one of `all_steps()`.
            state_dict: nested, like that which was saved; see `prime_optimizer`.

        Raises:
            CheckpointError: there is no such checkpoint; a file is missing, truncated or altered,
                which is named; or an earlier `save_async` failed.
            RuntimeError: the checkpoint lacks values of the state dict, or has other shapes.
        """
        self._wait()
        step = _at_least(0, "step", step)
        folder = self._training.broadcast(lambda: self._steps.folder(step))
        self._check(step, folder)
        protocol.read(self._steps.store, folder, state_dict, self._training)

    def all_steps(self) -> list[int]:
        """Every step that has a complete checkpoint, in order, as the storage has them now.

        Raises:
            CheckpointError: an earlier `save_async` failed.
        """
        self._raise_failures()
        return self._steps.all()

    def join(self) -> None:
        """Wait for every `save_async`, and watch for SIGTERM no longer, until the next step.

        Raises:
            CheckpointError: one of them failed.
        """
        self._watch.stop()
        self._wait()

    def close(self) -> None:
        """Wait as `join` does, and end the thread that writes; nothing can be saved afterwards.

        Raises:
            CheckpointError: a `save_async` failed.
        """
        try:
            self.join()
        finally:
            self._worker.shutdown()

    def reached_preemption(self, step: int) -> bool:
        """Whether SIGTERM arrived, at this step or before.

        Where several processes save together it is true in all if it is in one, and each must ask
        at the same steps.

        Args:
            step: of training.

        Raises:
            RuntimeError: `chkpt_on_preemption` is False.
            CheckpointError: an earlier `save_async` failed.
        """
        if not self.chkpt_on_preemption:
            raise RuntimeError(
                "this CheckpointManager does not watch for SIGTERM; make it with "
                "chkpt_on_preemption=True"
            )
        self._raise_failures()
        self._watch.start()
        return any(self._training.all_gather(lambda: self._watch.reached))

    def __enter__(self) -> CheckpointManager:
        """The manager itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _prepare_folder(self) -> None:
        self._steps.store.make_folder("")
        if isinstance(self._steps.store, LocalStore):
            self._steps.remove_leftovers(all_of_them=False)

    def _save(self, step: int, state_dict: STATE_DICT_TYPE) -> None:
        """Write and commit one checkpoint; all processes do this together, one save at a time."""
        group, steps = self._saving, self._steps
        with contextlib.ExitStack() as stack:
            folder = group.broadcast(lambda: stack.enter_context(steps.saving(step)))
            name = steps.store.full_path(str(step))
            files = protocol.write(
                steps.store, folder, state_dict, group, self.num_of_threads, name
            )
            group.broadcast(lambda: steps.commit(folder, step, files))
        group.broadcast(lambda: steps.prune(step, self.max_to_keep))

    def _check(self, step: int, folder: str) -> None:
        """Compare the files of a checkpoint with its manifest; the processes share them out."""
        group, steps = self._training, self._steps
        manifest = group.broadcast(lambda: steps.manifest(folder))
        if manifest is None:
            return
        if manifest.step != step:
            raise CheckpointError(
                f"{steps.store.full_path(folder)} holds the checkpoint of step {manifest.step}: it "
                "was renamed or copied; give the folder the name of its step"
            )
        assigned = dict(sorted(manifest.files.items())[group.rank :: group.size])
        errors = [
            error
            for errors in group.all_gather(lambda: steps.check(folder, assigned))
            for error in errors
        ]
        if errors:
            others = [other for other in steps.all() if other != step]
            raise CheckpointError(
                f"the checkpoint of step {step} is damaged, and nothing was restored: "
                f"{'; '.join(errors)}. Restore another step: {others}."
            )

    def _wait(self) -> None:
        concurrent.futures.wait(self._pending)
        self._raise_failures()

    def _raise_failures(self) -> None:
        """Raise what finished saves have raised, once."""
        ended = [future for future in self._pending if future.done()]
        failed = [(self._pending.pop(future), future.exception()) for future in ended]
        errors = [(step, error) for step, error in failed if error is not None]
        if errors:
            lines = "; ".join(
                f"step {step}: {type(error).__name__}: {error}" for step, error in errors
            )
            raise CheckpointError(
                f"checkpoints that save_async took were not written completely: {lines}"
            ) from errors[0][1]


def store_at(path: str | os.PathLike[str]) -> Store:
    """The store behind a path.

    Args:
        path: a folder of this machine, or a URL such as `"gs://bucket/run"` of a protocol whose
            fsspec package is installed; `"file://"` is this machine.

    Example:
        >>> store_at("checkpoints").atomic, store_at("memory://checkpoints").atomic
        (True, False)
    """
    text = os.fspath(path)
    if "://" not in text and "::" not in text:
        return LocalStore(text)
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    files, root = url_to_fs(text)
    return LocalStore(root) if isinstance(files, LocalFileSystem) else FsspecStore(files, root)


def _at_least(least: int, name: str, value: Any) -> int:
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if integer < least:
        raise ValueError(f"{name} is an integer of at least {least}, not {value!r}")
    return integer
