"""Checks of a training step's state: its shardings, and that the loss keeps its structure."""

from __future__ import annotations

from typing import Any

import jax

from isoshard.core.errors import ShardingError
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.spec import same_layout
from isoshard.core.runtime._jax_internals.tracers import Tracer


def check_layout(state: Any, layouts: Any) -> None:
    """Raise if a state is not sharded by the step's plan.

    Raises:
        ShardingError: naming each array with another sharding.
    """
    pairs = zip(named_leaves(state), jax.tree.leaves(layouts), strict=True)
    wrong = [
        f"  {name}: is sharded as {getattr(x.sharding, 'spec', x.sharding)}, by the plan {to.spec}"
        for (name, x), to in pairs
        if isinstance(x, jax.Array)
        and not isinstance(x, Tracer)
        and not same_layout(x.sharding, to, x.ndim)
    ]
    if wrong:
        raise ShardingError(
            "\n".join(["the state is not sharded by the step's plan:", *wrong])
            + "\nCreate it with step.init(make) or step.start(model)."
        )


def check_structure(before: Any, after: Any) -> None:
    """Raise if a model has other leaves or modules after a step.

    Raises:
        ShardingError: naming the leaves that are new and those that are gone.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        old, new = (dict(named_leaves(tree)) for tree in (before, after))
        changes = [f"{name} is new" for name in new if name not in old]
        changes += [f"{name} is gone" for name in old if name not in new]
        raise ShardingError(
            "the loss changed the structure of the model, and a step returns a state of the same "
            f"structure: {'; '.join(changes) or 'modules or attributes differ'}"
        )
