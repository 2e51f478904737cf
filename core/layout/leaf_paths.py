"""Names of the leaves of a tree: their paths, joined by dots.

>>> named_leaves({"blocks": [{"weight": 1.0}]})
[('blocks.0.weight', 1.0)]
"""

from __future__ import annotations

from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
    """Join a JAX key path with dots.

    Args:
        path: keys as `jax.tree.leaves_with_path` gives them.

    Returns:
        The name. The leaf in a box around one array (a Flax `Variable` or `Partitioned`, whose leaf
        is its attribute `value`) has the name of the box.

    Example:
        >>> path_name((jax.tree_util.DictKey("blocks"), jax.tree_util.SequenceKey(0)))
        'blocks.0'
    """
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """List the leaves of a pytree with their names, paths joined by dots.

    Example:
        >>> named_leaves({"a": [1.0, 2.0]})
        [('a.0', 1.0), ('a.1', 2.0)]
    """
    return [(path_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
