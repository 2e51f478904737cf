"""Pipeline stages: the stage of every node, of which the file may name a few.

>>> from onnx import helper
>>> nodes = [helper.make_node("Relu", [a], [b], name=b) for a, b in ("xy", "yz", "zw")]
>>> x = helper.make_tensor_value_info("x", 1, [2])
>>> graph = Graph(helper.make_model(helper.make_graph(nodes, "g", [x], [])))
>>> stages_of(graph, {0: 0, 1: 1})                       # the third follows what it reads
(0, 1, 1)
>>> stages_of(graph, {0: 1, 1: 0})
Traceback (most recent call last):
    ...
isoshard.onnx_bridge.errors.AnnotationError: node 'z', tensor 'y': it is made in stage 1 and read in stage 0; values go on to later stages only

A node without a stage has the largest among those of the nodes it reads from. One that reads none
that has a stage (a chain on weights alone) has the smallest of those that read it.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping

from ..errors import AnnotationError, raise_annotations
from .graph import Graph, Node


def stages_of(graph: Graph, annotated: Mapping[int, int | None]) -> tuple[int, ...]:
    """Complete the stages of a graph.

    Raises:
        AnnotationError: a stage is negative, or a node reads a value of a later one; all errors in
            one message.
    """
    named = {index: stage for index, stage in annotated.items() if stage is not None}
    first = min(named.values(), default=0)
    stages: list[int | None] = []
    for node in graph.nodes:
        before = [stages[maker.index] for maker in _makers(graph, node)]
        input_stages = [stage for stage in before if stage is not None]
        stages.append(named.get(node.index, max(input_stages, default=None)))
    for node in reversed(graph.nodes):
        if stages[node.index] is None:
            readers = [r for value in node.outputs if value for r in graph.consumers(value)]
            after = [stage for r in readers if (stage := stages[r.index]) is not None]
            stages[node.index] = min(after, default=first)
    done = tuple(first if stage is None else stage for stage in stages)
    _check(graph, done)
    return done


def _makers(graph: Graph, node: Node) -> list[Node]:
    makers = [graph.producer(value) for value in (*node.inputs, *node.captured) if value]
    return [maker for maker in makers if maker is not None]


def _check(graph: Graph, stages: tuple[int, ...]) -> None:
    errors = []
    for node in graph.nodes:
        stage = stages[node.index]
        if stage < 0:
            errors.append(AnnotationError(f"its stage is {stage}; count from 0", node=node.name))
        for value in filter(None, (*node.inputs, *node.captured)):
            maker = graph.producer(value)
            if maker is not None and stages[maker.index] > stage:
                reason = (
                    f"it is made in stage {stages[maker.index]} and read in stage {stage}; values "
                    "go on to later stages only"
                )
                errors.append(AnnotationError(reason, node=node.name, tensor=value))
    raise_annotations(errors)
