"""Nestings of arguments and results in which quantized weights and the like are nodes.

>>> tree_flatten({"a": (1, [2])})[0]
[1, 2]
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.wrapper_tensors import WrapperKind, inner_tensors, is_wrapper


class _Node:
    """A wrapper in a nesting, as torch flattens nestings: its children are the inner tensors."""

    def __init__(self, children: Sequence[Any], kind: WrapperKind):
        self.children, self.kind = children, kind


def _unflatten(children: Iterable[Any], kind: WrapperKind) -> Any:
    """The wrapper of tensors; of anything else, such as references to tensors, a node again."""
    children = list(children)
    if all(isinstance(child, torch.Tensor) for child in children):
        return kind.build(dict(zip(kind.names(), children, strict=True)))
    return _Node(children, kind)


@functools.cache
def _register() -> None:
    """Register the node with torch, once."""
    pytree.register_pytree_node(_Node, lambda node: (list(node.children), node.kind), _unflatten)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """A nesting as torch flattens it, with the inner tensors of each wrapper in its place.

    `torch.utils._pytree.tree_unflatten` makes wrappers of them again.

    Returns:
        The leaves, and the structure, which tells wrappers of different kinds apart.
    """
    leaves, structure = pytree.tree_flatten(tree)
    if any(map(is_wrapper, leaves)):
        _register()
        return pytree.tree_flatten(pytree.tree_unflatten(list(map(_as_node, leaves)), structure))
    return leaves, structure


def _as_node(leaf: Any) -> Any:
    if not is_wrapper(leaf):
        return leaf
    return _Node(list(inner_tensors(leaf).values()), WrapperKind.of(leaf))
