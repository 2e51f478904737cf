"""Arithmetic of Python's numbers in a traced graph, which runs on the CPU in 64 bits.

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


def is_cpu_scalar(tensor: Any) -> bool:
    """Whether a tensor is a number on the CPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not tensor.dim()


class Prelude:
    """The operations of a graph that depend only on numbers on the CPU, removed from the graph.

    Args:
        module: the graph, which gets one more placeholder for each of their results.
        on_cpu: for each of its placeholders, whether it is a number on the CPU.
    """

    def __init__(self, module: torch.fx.GraphModule, on_cpu: Sequence[bool]):
        """Move the operations to a graph of their own."""
        graph, cpu_graph = module.graph, torch.fx.Graph()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        copies = {node: cpu_graph.placeholder(node.name) for node in inputs}
        cpu_nodes = {node for node, host in zip(inputs, on_cpu, strict=True) if host}
        for node in graph.nodes if cpu_nodes else ():
            operands = node.all_input_nodes
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            is_host = (
                cpu_nodes.issuperset(operands) if operands else is_cpu_scalar(node.meta.get("val"))
            )
            if node.op == "call_function" and is_host and not random:
                copies[node] = cpu_graph.node_copy(node, copies.__getitem__)
                cpu_nodes.add(node)
        computed = [node for node in graph.nodes if node in cpu_nodes and node not in inputs]
        outputs = [node for node in computed if not cpu_nodes.issuperset(node.users)]
        cpu_graph.output([copies[node] for node in outputs])
        self._run = torch.fx.GraphModule(module, cpu_graph) if outputs else None
        last = inputs[-1] if inputs else None
        for node in outputs:
            with graph.inserting_after(last):
                last = graph.placeholder(node.name)
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
        for node in reversed(computed):
            graph.erase_node(node)
        module.recompile()
        self._unused = [node.op == "placeholder" and not node.users for node in inputs]

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of the remaining graph; None for those that it does not use."""
        computed = [] if self._run is None else self._run(*arguments)
        return [
            *(
                None if skip else argument
                for skip, argument in zip(self._unused, arguments, strict=True)
            ),
            *computed,
        ]
