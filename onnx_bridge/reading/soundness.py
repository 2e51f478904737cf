"""What must hold before any part of a model is looked at: order, names, ends of recursion.

ONNX lists nodes in an order they can run in; a file may not. Functions may call functions, but not
themselves, and ten functions that each call the one before ten times are a small file that would
grow to 10,000,000,000 nodes.

>>> from onnx import helper
>>> loop = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
>>> x = helper.make_tensor_value_info("x", 1, [2])
>>> model_errors(helper.make_model(helper.make_graph(loop, "g", [x], [])))
["the graph is cyclic: 'a' needs 'b' needs 'a'"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import onnx

from .walking import bodies, describe_node, inner_graphs, shown

MOST_NODES = 1_000_000
MOST_DEVICES = 1 << 16


def too_many(model: onnx.ModelProto) -> list[str]:
    """Whether a model has more nodes than are looked at, without looking at them all."""
    total = 0
    for body in bodies(model):
        total += len(body.proto.node)
        if total > MOST_NODES:
            return [f"it has more than {MOST_NODES} nodes"]
    return []


def model_errors(model: onnx.ModelProto) -> list[str]:
    """Look for what would make reading a model go wrong or never end."""
    errors: list[str] = []
    if not model.ir_version:
        errors.append("it has no IR version")
    if not model.HasField("graph"):
        errors.append("it has no graph")
    errors += [
        f"configuration {shown(proto.name)} is for {proto.num_devices} devices, the most is "
        f"{MOST_DEVICES}"
        for proto in model.configuration
        if proto.num_devices > MOST_DEVICES
    ]
    for proto in (*model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if not 0 < proto.version < 1 << 31:
            errors.append(f"operator set {shown(proto.domain)} has version {proto.version}")
    errors += _functions(model)
    _graph("the graph", model.graph, [], errors)
    for step in model.training_info:
        for graph in (step.initialization, step.algorithm):
            _graph("a training graph", graph, [_names(model.graph)], errors)
    for function in model.functions:
        where = f"function {shown(function.name)}"
        _nodes(where, function.node, [set(function.input)], errors)
    return errors


def _names(graph: onnx.GraphProto) -> set[str]:
    names = {value.name for value in graph.input} | {proto.name for proto in graph.initializer}
    return names | {proto.values.name for proto in graph.sparse_initializer}


def _graph(where: str, graph: onnx.GraphProto, outside: list[set[str]], errors: list[str]) -> None:
    counts = Counter(proto.name for proto in graph.initializer)
    errors += [
        f"{where} has {count} weights called {shown(name)}"
        for name, count in counts.items()
        if count > 1
    ]
    scopes = [*outside, _names(graph)]
    _nodes(where, graph.node, scopes, errors)
    errors += [
        f"output {shown(value.name)} of {where} is made by nothing"
        for value in graph.output
        if not any(value.name in names for names in scopes)
    ]


def _nodes(
    where: str, nodes: Sequence[onnx.NodeProto], scopes: list[set[str]], errors: list[str]
) -> None:
    """Check the nodes in order; what they make joins the last set of `scopes`."""
    produced = scopes[-1]
    later = {name for node in nodes for name in node.output if name}
    early: list[str] = []
    for node in nodes:
        for name in filter(None, node.input):
            if any(name in names for names in scopes):
                continue
            if name in later:
                early.append(f"{describe_node(node)} reads {shown(name)} before it is made")
            else:
                errors.append(f"{describe_node(node)} reads {shown(name)}, which nothing makes")
        for inner in inner_graphs(node):
            _graph(*inner, scopes, errors)
        for name in filter(None, node.output):
            if name in produced:
                errors.append(f"{describe_node(node)} makes {shown(name)}, which is there already")
            produced.add(name)
    if early:
        round_trip = _cycle(nodes)
        if round_trip:
            path = " needs ".join(map(shown, round_trip[:8]))
            errors.append(f"{where} is cyclic: {path}")
        else:
            errors += early


def _cycle(nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """Values that need each other, the first again at the end; empty if there are none."""
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [[name for name in node.input if name in maker] for node in nodes]
    return _round_trip(list(maker), lambda name: needs[maker[name]])


def _round_trip(names: Iterable[str], needs: Callable[[str], list[str]]) -> list[str]:
    """Depth first without recursion: the first path that comes back to itself."""
    done: set[str] = set()
    for start in names:
        path: list[str] = []
        on_path: set[str] = set()
        stack = [(start, False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                path.pop()
                on_path.discard(name)
                done.add(name)
            elif name in on_path:
                return [*path[path.index(name) :], name]
            elif name not in done:
                path.append(name)
                on_path.add(name)
                stack.append((name, True))
                stack += [(other, False) for other in needs(name)]
    return []


def _functions(model: onnx.ModelProto) -> list[str]:
    """Functions that call themselves, are there twice, or grow without measure."""
    by_name: dict[str, onnx.FunctionProto] = {}
    errors = []
    for function in model.functions:
        key = _key(function.domain, function.name, function.overload)
        if key in by_name:
            errors.append(f"there are two functions {shown(function.name)}")
        by_name[key] = function
    calls = {key: _calls(function, by_name) for key, function in by_name.items()}
    path = _round_trip(list(calls), lambda key: list(calls[key]))
    if path:
        names = " calls ".join(shown(by_name[key].name) for key in path[:8])
        return [*errors, f"functions that call themselves never end: {names}"]
    sizes: dict[str, int] = {}
    pending = list(calls)
    while pending:
        key = pending.pop()
        missing = [other for other in calls[key] if other not in sizes]
        if missing:
            pending += [key, *missing]
            continue
        inner = sum(count * sizes[other] for other, count in calls[key].items())
        sizes[key] = min(MOST_NODES + 1, len(by_name[key].node) + inner)
    total = sum(sizes[key] * n for key, n in _calls(model.graph, by_name).items())
    if total > MOST_NODES:
        errors.append(f"its functions, written out, are more than {MOST_NODES} nodes")
    return errors


def _calls(
    proto: onnx.GraphProto | onnx.FunctionProto, functions: dict[str, onnx.FunctionProto]
) -> Counter[str]:
    """How often a body calls each function of the model, graphs inside its nodes included."""
    count: Counter[str] = Counter()
    waiting = [proto]
    while waiting:
        for node in waiting.pop().node:
            key = _key(node.domain, node.op_type, node.overload)
            if key in functions:
                count[key] += 1
            waiting += [graph for _, graph in inner_graphs(node)]
    return count


def _key(domain: str, name: str, overload: str) -> str:
    return f"{domain}\0{name}\0{overload}"
