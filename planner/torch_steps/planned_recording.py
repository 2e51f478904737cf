"""A step recorded once on a tape that is never executed: like a capture, without guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import Mesh

from isoshard.torch_bridge.kit import (
    PLANNING,
    Argument,
    ClearedGradients,
    CpuOps,
    FloatInputs,
    MemoryLog,
    MetadataLog,
    ObjectWalk,
    Recording,
    Table,
    TrainingState,
    compiling,
    has_gradient,
    lazy_tensor,
    random_state,
)

from .planning_tape import PlanningTape


class _CpuOps(CpuOps):
    """CPU operations of a step; those with a tensor of the device pass without a search."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, lazy_tensor.LazyTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class PlannedRecording(Recording):
    """A step that ran on a `PlanningTape`.

    Args:
        step: the step.
        walk: the objects that it reads, whose tensors have no elements.
        arguments: its tensor arguments.
        mesh: the mesh of the plan.
    """

    tape: PlanningTape

    def __init__(
        self,
        step: Callable[..., Any],
        walk: ObjectWalk,
        arguments: Sequence[Any],
        mesh: Mesh,
    ):
        """Prepare to record; state that only guards of a capture need is left out."""
        self._step = step
        self.walk = self.reached = walk
        self.arguments = list(arguments)
        leaves = list(walk.leaves())
        leaf_ids = {id(leaf) for leaf in leaves}
        differentiable = [
            index
            for index, argument in enumerate(arguments)
            if has_gradient(argument) and id(argument) not in leaf_ids
        ]
        self.owners = [*leaves, *(Argument(index) for index in differentiable)]
        self.tensors = [*leaves, *(arguments[index] for index in differentiable)]
        self._learning_rates = []
        self.rebindings, self.changed_arguments = [], []
        self.metadata = MetadataLog()
        self.table = Table()
        self.floats = FloatInputs(self.table, ())
        self.cpu_ops = _CpuOps(self.table, walk.tensors)
        self.tape = PlanningTape(mesh)
        self.log = self.tape.log = MemoryLog(self.tape)
        self.random = random_state.DrawnKeys()
        self.training_state = TrainingState(walk, self.tensors)
        self.cleared_gradients = ClearedGradients(
            [*walk.modules, *walk.optimizers], self.is_written
        )
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.differentiable: frozenset[int] = frozenset()

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the step on the tape.

        Raises:
            CaptureError: it reads the value of a tensor.
        """
        self._make_symbolic(self.walk.optimizers)
        self.tape.capture = self.cpu_ops
        PLANNING.add(id(self.tape))
        try:
            with (
                self.on_tape(),
                self.random,
                self.cleared_gradients,
                compiling(),
                self.cpu_ops,
                self.floats,
            ):
                self._store_result(self._step(*args, **kwargs))
            if self.cpu_ops.error is not None:  # and caught
                raise self.cpu_ops.error
        finally:
            PLANNING.discard(id(self.tape))
            self.tape.capture = None
            for group, rate, symbol in self._learning_rates:
                if group["lr"] is symbol:
                    group["lr"] = rate
            self._learning_rates.clear()

    def undo(self) -> None:
        """Restore memory, gradients, counters and random states from before the step."""
        self.restore()
        self.training_state.restore_gradients()
        self.training_state.restore_scalers()
        self.training_state.restore_counters()
        with torch.no_grad():
            self.cpu_ops.reset()
        self.random.restore()

    def forget(self) -> None:
        """Clear the recording."""
        self.log.clear()
        self.tape.forget()
