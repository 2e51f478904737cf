"""What a training step refuses: a state laid out otherwise, a model that changed its parts."""

from __future__ import annotations

from typing import Any

import jax

from isoshard.core.errors import ShardingError
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.spec import same_layout
from isoshard.core.runtime._jax_internals.tracers import Tracer


def check_layout(state: Any, layouts: Any) -> None:
    """Refuse a state that was laid out by another plan.

    Raises:
        ShardingError: naming each array that lies elsewhere.
    """
    pairs = zip(named_leaves(state), jax.tree.leaves(layouts), strict=True)
    wrong = [
        f"  {name}: lies by {getattr(x.sharding, 'spec', x.sharding)}, and the plan says {to.spec}"
        for (name, x), to in pairs
        if isinstance(x, jax.Array)
        and not isinstance(x, Tracer)
        and not same_layout(x.sharding, to, x.ndim)
    ]
    if wrong:
        raise ShardingError(
            "\n".join(["the state is not laid out by the step's plan:", *wrong])
            + "\nMake it with step.init(make) or step.start(model)."
        )


def check_structure(before: Any, after: Any) -> None:
    """Refuse a model that is made of other parts after a step.

    Raises:
        ShardingError: naming what is new and what is gone.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        old, new = (dict(named_leaves(tree)) for tree in (before, after))
        told = [f"{name} is new" for name in new if name not in old]
        told += [f"{name} is gone" for name in old if name not in new]
        raise ShardingError(
            "the loss changed what the model is made of, and a step returns a state like the one "
            f"it was given: {'; '.join(told) or 'modules or attributes differ'}"
        )
