"""The table: which entry serves, and that every entry is tested and listed in the docs."""

import collections
import importlib
import itertools
import re
from pathlib import Path

import jax
import numpy as np
from onnx import defs

import isoshard
from isoshard.onnx_bridge.executor import evaluate
from isoshard.onnx_bridge.executor.operators import entries, find, operator
from isoshard.onnx_bridge.executor.operators.registry import NEWEST
from isoshard.onnx_bridge.reading import Graph

FAMILIES = [
    importlib.import_module(f"tests.onnx_bridge.executor.operators.{path.stem}")
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path.name != Path(__file__).name
]
CASES = [case for family in FAMILIES for case in family.CASES]
OURS = [entry for entry in entries() if not entry.domain]
CONSTANT = {"Constant", "ConstantOfShape", "Range"}  # they have no input to split
OWN_DTYPE = {"Cast", "CastLike", "EyeLike", "OneHot", "Range"}
DOCS = Path(__file__).resolve().parents[4] / "docs" / "onnx.md"


def test_every_entry_is_compared_with_onnx():
    found = [find("", case.op, case.opset) for case in CASES]
    missing = {(entry.op_type, entry.since) for entry in OURS if entry not in found}
    assert missing == {("NonZero", 9)}  # tested in test_index.py


def test_every_operator_is_run_on_eight_devices():
    split = {case.op for case in CASES if case.split}
    assert {entry.op_type for entry in OURS} - CONSTANT - split == {"NonZero"}


def test_the_docs_list_every_operator():
    table = DOCS.read_text().split("## Operators")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")]
    listed = re.findall(r"\b[A-Z]\w+", " ".join(rows[1:]))
    assert sorted(listed) == sorted({entry.op_type for entry in OURS} | {"If"})


def test_results_of_short_floats_are_short():
    """Abstractly, without compiling: no result becomes wider than ONNX says."""
    wrong = []
    for case, dtype in zip(CASES, itertools.cycle(("bfloat16", "float16"))):
        if case.op in OWN_DTYPE or not any(is_float(x) for x in case.inputs):
            continue
        short = tuple(
            x.astype(dtype) if is_float(x) and k not in case.known else x
            for k, x in enumerate(case.inputs)
        )
        graph = Graph(case.model)
        known = {f"x{k}": short[k] for k in case.known if short[k] is not None}
        given = {
            f"x{k}": jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
            for k, x in enumerate(short)
            if x is not None and k not in case.known
        }

        def run(given, graph=graph, known=known):
            found = evaluate(graph.nodes, {**given, **known}, graph.opsets)
            return [found[name] for name in graph.outputs]

        first, *_ = jax.eval_shape(run, given)
        if first.dtype == np.float32 or first.weak_type:
            wrong.append(str(case))
    assert not wrong


def is_float(x):
    return x is not None and x.dtype == np.float32


def test_attributes_are_onnx_own():
    known = collections.defaultdict(set)
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain:
            known[schema.name].update(schema.attributes)
    for entry in OURS:
        assert entry.attributes <= known[entry.op_type], entry.op_type


def test_the_newest_entry_that_is_old_enough_serves():
    assert [find("", "Split", opset).since for opset in (2, 12, 13, 17, 18, 25)] == [
        2, 2, 13, 13, 18, 18,
    ]  # fmt: skip
    assert find("ai.onnx", "Add", 14) is find("", "Add", 14)
    assert find("", "Gelu", 19) is None


def test_an_operator_that_onnx_changed_since_is_not_taken_for_known():
    changed = [
        schema
        for schema in defs.get_all_schemas()
        if not schema.domain and schema.since_version > NEWEST and find("", schema.name, NEWEST)
    ]
    assert changed
    for schema in changed:
        assert find("", schema.name, schema.since_version) is None


def test_users_add_operators():
    assert isoshard.onnx.operator is operator

    @operator("TestTwice", domain="test.domain", since=2)
    def twice(x, *, times=2):
        return x * times

    assert find("test.domain", "TestTwice", 1) is None
    assert find("test.domain", "TestTwice", 3).attributes == {"times"}
