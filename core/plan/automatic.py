"""`Plan.auto`: a plan that the planner searches for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from isoshard.core import extensions

if TYPE_CHECKING:
    from typing import Self


class Automatic:
    """The constructor of `Plan` that searches; `Plan` inherits it."""

    @classmethod
    def auto(
        cls,
        step: Any,
        args: Sequence[Any] | None,
        mesh: Any,
        *,
        memory: int | None = None,
        fixed: Any = None,
    ) -> Self:
        """Search for the plan under which a step is fastest and fits in memory.

        Nothing runs and no weights are created: arguments may be shapes, and the devices of the
        mesh may be described (`iso.planner.topology`). `iso.planner.search` also returns the plan's
        cost and the runners-up, and searches for the shape of the mesh.

        Args:
            step: a training step or another function: of JAX, or of a framework with a bridge.
            args: its arguments, or `jax.ShapeDtypeStruct`s; None of a `TracedStep`.
            mesh: the mesh.
            memory: bytes that one device has; by default what the chip has.
            fixed: a plan whose rules are kept; the search decides the rest.

        Returns:
            A plan with a rule for every parameter, and one for the batch.

        Raises:
            ShardingError: no plan fits; the message has the excess, and how to fix it.
            PlanError: `fixed` names an axis that is not on the mesh.

        Example:
            >>> import isoshard as iso
            >>> import jax
            >>> def step(params, x):
            ...     grads = jax.grad(lambda p: ((x @ p["up"] @ p["down"]) ** 2).mean())(params)
            ...     return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            >>> wide = jax.ShapeDtypeStruct((4096, 16384), "float32")
            >>> params = {"up": wide, "down": jax.ShapeDtypeStruct((16384, 4096), "float32")}
            >>> mesh = iso.make_mesh((2, 4), ("data", "model"))
            >>> x = jax.ShapeDtypeStruct((64, 4096), "float32")
            >>> iso.Plan.auto(step, (params, x), mesh).spec_for("up", (4096, 16384), mesh) == iso.P()
            False
        """  # noqa: E501
        return extensions.search_plan(step, args, mesh, memory=memory, fixed=fixed)
