"""What a traced graph computes of Python's numbers, which is done on the CPU in 64 bits.

Dynamo makes floats that change inputs of the graph: tensors of no axes and 64 bits on the CPU. The
device computes in 32, in which a clock is only right to a millisecond, so arithmetic among such
numbers runs before the graph.

>>> def late(x, now, start):
...     return x * (now - start)
>>> module = torch.fx.symbolic_trace(late)
>>> on_cpu = [False, True, True]
>>> prelude = Prelude(module, on_cpu)
>>> prelude(["x", 3.0, 1.0]), [node.name for node in module.graph.nodes]
(['x', None, None, 2.0], ['x', 'now', 'start', 'sub_1', 'mul', 'output'])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_number(tensor: Any) -> bool:
    """Whether a tensor is a number on the CPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.dim()


class Prelude:
    """The part of a graph that depends on nothing but numbers on the CPU; it is taken out.

    Args:
        module: the graph, which gets one more placeholder for each number that it goes on with.
        on_cpu: for each of its placeholders, whether it is a number on the CPU.
    """

    def __init__(self, module: torch.fx.GraphModule, on_cpu: Sequence[bool]):
        """Take it out."""
        graph, own = module.graph, torch.fx.Graph()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        copies = {node: own.placeholder(node.name) for node in inputs}
        mine = {node for node, host in zip(inputs, on_cpu, strict=True) if host}
        for node in graph.nodes if mine else ():
            given = node.all_input_nodes
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            known = mine.issuperset(given) if given else is_number(node.meta.get("val"))
            if node.op == "call_function" and known and not random:
                copies[node] = own.node_copy(node, copies.__getitem__)
                mine.add(node)
        computed = [node for node in graph.nodes if node in mine and node not in inputs]
        handed = [node for node in computed if not mine.issuperset(node.users)]
        own.output([copies[node] for node in handed])
        self._run = torch.fx.GraphModule(module, own) if handed else None
        last = inputs[-1] if inputs else None
        for node in handed:
            with graph.inserting_after(last):
                last = graph.placeholder(node.name)
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
        for node in reversed(computed):
            graph.erase_node(node)
        module.recompile()
        self._unused = [node.op == "placeholder" and not node.users for node in inputs]

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of the graph that is left; None for those that it does not use."""
        found = [] if self._run is None else self._run(*arguments)
        return [
            *(None if skip else one for skip, one in zip(self._unused, arguments, strict=True)),
            *found,
        ]
