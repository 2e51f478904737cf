"""The tensors that an autograd graph ends in.

>>> x, y = torch.ones(2, requires_grad=True), torch.ones(2)
>>> [leaf is x for leaf in leaves_of([(2 * x + y).grad_fn])]
[True]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def leaves_of(graphs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that autograd graphs end in.

    Args:
        graphs: nodes, or None.
    """
    stack, seen, leaves = list(graphs), set(), []
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
    return leaves
