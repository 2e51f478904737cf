"""A step run once on a tape that is never executed: what a capture records, without its guards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import Mesh

from isoshard.torch_bridge.engine.capture.bindings import Argument
from isoshard.torch_bridge.engine.capture.host_counters import HostOps
from isoshard.torch_bridge.engine.capture.numbers import Numbers
from isoshard.torch_bridge.engine.capture.reachable import Reachable
from isoshard.torch_bridge.engine.capture.snapshot import Snapshot
from isoshard.torch_bridge.engine.capture.step import PLANS
from isoshard.torch_bridge.engine.capture.step_arguments import has_gradient
from isoshard.torch_bridge.engine.capture.step_recording import Recording
from isoshard.torch_bridge.engine.capture.tensor_descriptions import Descriptions
from isoshard.torch_bridge.engine.capture.tracing_flag import compiling
from isoshard.torch_bridge.engine.capture.zeroing import Zeroing
from isoshard.torch_bridge.engine.recording import lazy_tensor, random_state
from isoshard.torch_bridge.engine.recording.memory_log import MemoryLog
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table

from .planning_tape import PlanningTape
from .user_lines import UserLines


class _HostOps(HostOps):
    """CPU operations of a step; those with a tensor of the device pass without a search."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(dtype, lazy_tensor.LazyTensor) for dtype in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class PlannedRecording(Recording):
    """A step that ran on a `PlanningTape`.

    Args:
        step: the step.
        found: the objects behind it, whose tensors have no elements.
        arguments: its tensor arguments.
        mesh: what it is planned for.
        user: tells the user's lines.
    """

    tape: PlanningTape

    def __init__(
        self,
        step: Callable[..., Any],
        result: Reachable,
        arguments: Sequence[Any],
        mesh: Mesh,
        user: UserLines,
    ):
        """Prepare to record; what a capture needs for its guards is left out."""
        self._step = step
        self.found = self.reached = result
        self.arguments = list(arguments)
        leaves = list(result.leaves())
        leaf_ids = {id(leaf) for leaf in leaves}
        mine = [
            index
            for index, argument in enumerate(arguments)
            if has_gradient(argument) and id(argument) not in leaf_ids
        ]
        self.owners = [*leaves, *(Argument(index) for index in mine)]
        self.tensors = [*leaves, *(arguments[index] for index in mine)]
        self._rates = []
        self.rebound, self.turned = [], []
        self.described = Descriptions()
        self.table = Table()
        self.numbers = Numbers(self.table, ())
        self.host = _HostOps(self.table, result.tensors)
        self.tape = PlanningTape(mesh, user)
        self.log = self.tape.log = MemoryLog(self.tape)
        self.random = random_state.DrawnKeys()
        self.snapshot = Snapshot(result, self.tensors)
        self.zeroing = Zeroing(result, self.is_written)
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.differentiable: frozenset[int] = frozenset()

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the step on the tape.

        Raises:
            CaptureError: it asks for the value of a tensor.
        """
        self._make_symbolic(self.found.optimizers)
        self.tape.capture = self.host
        PLANS.add(id(self.tape))
        try:
            with self.on_tape(), self.random, self.zeroing, compiling(), self.host, self.numbers:
                self._keep(self._step(*args, **kwargs))
            if self.host.refused is not None:  # and caught
                raise self.host.refused
        finally:
            PLANS.discard(id(self.tape))
            self.tape.capture = None
            for group, rate, symbol in self._rates:
                if group["lr"] is symbol:
                    group["lr"] = rate
            self._rates.clear()

    def undo(self) -> None:
        """Let memory, gradients, counters and random states be as before the step."""
        self.put_back()
        self.snapshot.restore_gradients()
        self.snapshot.restore_scalers()
        self.snapshot.restore_counters()
        with torch.no_grad():
            self.host.restart()
        self.random.restore()

    def forget(self) -> None:
        """Let go of what was recorded."""
        self.log.clear()
        self.tape.forget()
