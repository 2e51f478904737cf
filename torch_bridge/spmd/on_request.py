"""Automatic sharding where a script requests it; the search is imported at the first such step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from isoshard.core import extensions
from isoshard.torch_bridge.engine.capture import step as capture
from isoshard.torch_bridge.spmd import first_layouts
from isoshard.torch_bridge.spmd.modes import auto_spmd


def argument_sharder(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> capture.ShardArguments | None:
    """Shard a step automatically before its first call, if that was requested.

    Returns:
        A function that shards the arguments of each call; None if no plan was requested.

    Raises:
        ShardingError: as `automatic_layouts.shard_step`.
    """
    if not auto_spmd() and not first_layouts.any_plan_requested():
        return None
    return extensions.shard_step(step, args, kwargs)


def auto_plan(module: torch.nn.Module) -> Any:
    """The plan by which a model was sharded, with its mesh, its cost and the runners-up.

    A plan is found at the first call of a compiled step, if `torch_xla.runtime.use_spmd(auto=True)`
    was called, or the model was given to `auto_policy`.

    Args:
        module: the outermost that the step uses, or one inside it.

    Returns:
        The `isoshard.planner.SearchResult`; `print` it. None if nothing was found for the model.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> model = torch.nn.Linear(512, 512)
        >>> xs.auto_plan(model) is None
        True
        >>> mesh = xs.Mesh(range(8), (8,), ("data",))
        >>> model = xs.xla_distribute_module(model, mesh, xs.spmd.auto_policy)
        >>> step = xs.compile(lambda x: model(x).square().mean())
        >>> _ = step(torch.ones(64, 512, device="jax"))
        >>> xs.auto_plan(model).mesh == mesh.get_jax_mesh()
        True
    """
    return extensions.automatic_plan(module)


capture.ARGUMENT_SHARDERS.append(argument_sharder)
