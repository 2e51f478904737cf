"""A function over the leading axis of tensors, by torch_xla's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoshard.torch_bridge.kit import scanning

__all__ = ["scan"]


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Any = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Call `fn` for each element of `xs` along its leading axis, handing a carry on.

    Args:
        fn: `(carry, x) -> (carry, y)`; all of them tensors, or nestings of tensors and None.
        init: the first carry; every carry has its shapes and dtypes.
        xs: tensors of one length on the `jax` device.
        partition_fn: `functorch.compile.default_partition` (or None) to keep what backward needs,
            `functorch.compile.min_cut_rematerialization_partition` to keep the carries and compute
            the rest again.
        is_fn_pure: the Python code of `fn` need not run again for the same shapes.

    Returns:
        The last carry, and all `y` stacked along a new leading axis.

    Raises:
        ValueError: `fn` cannot be called, `xs` has no tensor, lengths differ, or `partition_fn` is
            another one.
        TypeError: a leaf is no tensor on the `jax` device, or a carry changes its shape or dtype.
    """
    recompute = recomputes(partition_fn)
    return scanning.scan(fn, init, xs, recompute=recompute, pure=is_fn_pure)


def recomputes(partition_fn: Any) -> bool:
    """Whether a partitioner of functorch recomputes instead of saving.

    Args:
        partition_fn: one of functorch's two; None for the default.

    Raises:
        ValueError: it is neither.
    """
    name = getattr(partition_fn, "__name__", None)
    if partition_fn is None or name == "default_partition":
        return False
    if name == "min_cut_rematerialization_partition":
        return True
    raise ValueError(
        f"partition_fn={partition_fn!r} works on a torch.fx graph, and there is none here; "
        "possible are functorch.compile.default_partition (keep what backward needs) and "
        "functorch.compile.min_cut_rematerialization_partition (compute it again)"
    )
