"""Name scopes in a trace of `jax.profiler`.

On TPUs and GPUs XLA writes the name scope of an instruction beside it. On CPUs a trace has the name
of the instruction only, so the scope is read from the program's text, in which both are.

>>> text = '''HloModule jit_f
... ENTRY %main (x: f32[2]) -> f32[2] {
...   %x = f32[2] parameter(0)
...   ROOT %tanh.1 = f32[2] tanh(%x), metadata={op_name="jit(f)/Net/layers.0/tanh"}
... }'''
>>> scopes_of(text)
{'tanh.1': 'jit(f)/Net/layers.0/tanh'}
>>> event = {"name": "tanh.1", "args": {"hlo_module": "jit_f", "hlo_op": "tanh.1", "run_id": "7"}}
>>> named_events([event], [text])
[{'name': 'Net/layers.0/tanh', 'args': {'hlo_module': 'jit_f', 'hlo_op': 'tanh.1', 'run_id': '7', \
'op_name': 'jit(f)/Net/layers.0/tanh'}}]
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .hlo_text import HloModule, Instruction, parsed

_OP_NAME = re.compile(r'op_name="(?P<path>(?:[^"\\]|\\.)*)"')
_MODULE = re.compile(r"HloModule (?P<name>[^,\s]+)")


def scopes_of(text: str) -> dict[str, str]:
    """The `op_name` of each instruction of a program; of a fusion without one that of its root.

    Args:
        text: the optimized HLO.
    """
    module = parsed(text)
    scopes: dict[str, str] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            scope = _scope(module, instruction)
            if scope:
                scopes[instruction.name] = scope
    return scopes


def _scope(module: HloModule, instruction: Instruction) -> str:
    own = _OP_NAME.search(instruction.attributes)
    if own and "/" in own["path"]:
        return own["path"].replace('\\"', '"')
    for name in instruction.called:
        computation = module.computations.get(name)
        if computation is None or instruction.opcode in ("while", "conditional"):
            continue
        inside = [computation.root, *reversed([*computation.instructions.values()])]
        for scope in (_OP_NAME.search(inner.attributes) for inner in inside):
            if scope and "/" in scope["path"]:
                return scope["path"].replace('\\"', '"')
    return ""


def named_events(
    events: Sequence[Mapping[str, Any]], programs: Sequence[str]
) -> list[Mapping[str, Any]]:
    """A trace's events, those of instructions with their scopes.

    Args:
        events: of a trace in Chrome's format, as `jax.profiler` writes them.
        programs: the text of each program that ran, in the order of the runs.

    Returns:
        The events: `args["op_name"]` is HLO's, and `name` the same without the function that was
        compiled. Events that have an `op_name` already, and those of other programs, are as before.
    """
    texts: dict[str, list[str]] = {}
    for text in programs:
        module = _MODULE.match(text)
        texts.setdefault(module["name"] if module else "", []).append(text)
    runs: dict[str, list[str]] = {module: [] for module in texts}
    timed = sorted(events, key=lambda event: event.get("ts", 0.0))
    for event in timed:
        args = event.get("args", {})
        ids = runs.get(args.get("hlo_module", ""))
        if ids is not None and args.get("run_id", "") not in ids:
            ids.append(args.get("run_id", ""))
    scopes: dict[str, dict[str, str]] = {}
    tables: dict[tuple[str, str], dict[str, str]] = {}
    for module, ids in runs.items():
        for index, run in enumerate(ids):
            text = texts[module][min(index, len(texts[module]) - 1)]
            if text not in scopes:
                scopes[text] = scopes_of(text)
            tables[module, run] = scopes[text]
    return [_named(event, tables) for event in events]


def _named(
    event: Mapping[str, Any], tables: Mapping[tuple[str, str], Mapping[str, str]]
) -> Mapping[str, Any]:
    args = event.get("args", {})
    table = tables.get((args.get("hlo_module", ""), args.get("run_id", "")))
    scope = None if table is None else table.get(args.get("hlo_op", ""))
    if scope is None or "op_name" in args:
        return event
    return {**event, "name": scope.partition("/")[2], "args": {**args, "op_name": scope}}


def name_trace(path: Path, programs: Sequence[str]) -> None:
    """Write the scopes into a Perfetto trace, in place.

    Args:
        path: of `perfetto_trace.json.gz`, as `jax.profiler.trace(.., create_perfetto_trace=True)`
            writes it.
        programs: as of `named_events`.
    """
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = named_events(trace["traceEvents"], programs)
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
