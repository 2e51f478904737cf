"""What other tools do to annotations: the table in docs/onnx.md, line by line."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir
import onnxruntime
import onnxscript.optimizer
import onnxscript.version_converter
import pytest
from onnx import helper, numpy_helper
from onnx_ir.passes.common import InlinePass

from isoshard.onnx_bridge import AnnotationWarning, load, validate
from isoshard.onnx_bridge.checking import RULES
from tests.onnx_bridge.checking.broken import split, value


def annotated(function=False):
    """`y = relu(x @ transpose(v))`: the transposed weight and the results are split in two."""
    turn = helper.make_node("Transpose", ["v"], ["w"], name="turn", perm=[1, 0])
    up = helper.make_node("MatMul", ["x", "w"], ["h"], name="up")
    act = helper.make_node("Relu", ["h"], ["y"], name="act")
    if function:
        act = helper.make_node("Act", ["h"], ["y"], name="act", domain="mine")
    for node, names in ((up, ("w", "h")), (act, ("h", "y"))):
        entry = node.device_configurations.add(configuration_id="tp", pipeline_stage=0)
        for name in names:
            split(entry.sharding_spec.add(tensor_name=name, device=[0, 1]), 1, 2)
    v = numpy_helper.from_array(np.ones((16, 8), np.float32), "v")
    graph = helper.make_graph(
        [turn, up, act], "g", [value("x", [4, 8])], [value("y", [4, 16])], [v]
    )
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, ir_version=11, opset_imports=opsets)
    model.configuration.add(name="tp", num_devices=2)
    if function:
        model.opset_import.append(helper.make_opsetid("mine", 1))
        inner = helper.make_node("Relu", ["a"], ["b"], name="relu")
        entry = inner.device_configurations.add(configuration_id="tp")
        split(entry.sharding_spec.add(tensor_name="a", device=[0, 1]), 1, 2)
        made = helper.make_function("mine", "Act", ["a"], ["b"], [inner], opsets)
        model.functions.append(made)
    return model


def specs(model):
    """(operator, tensor) of every spec in the main graph."""
    return {
        (node.op_type, spec.tensor_name)
        for node in model.graph.node
        for entry in node.device_configurations
        for spec in entry.sharding_spec
    }


ALL = {("MatMul", "w"), ("MatMul", "h"), ("Relu", "h"), ("Relu", "y")}


def json_text(model, folder):
    onnx.save(model, folder / "m.json")
    return onnx.load(folder / "m.json")


def textproto(model, folder):
    onnx.save(model, folder / "m.textproto")
    return onnx.load(folder / "m.textproto")


def external(model, folder):
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, size_threshold=0, location="w")
    return load(folder / "m.onnx")


def shapes(model, folder):
    return onnx.shape_inference.infer_shapes(model)


def ir(model, folder):
    return onnx_ir.to_proto(onnx_ir.from_proto(model))


def ir_inline(model, folder):
    return onnx_ir.to_proto(InlinePass()(onnx_ir.from_proto(model)).model)


def script_version(model, folder):
    made = onnx_ir.from_proto(model)
    onnxscript.version_converter.convert_version(made, 20)  # in place
    assert made.opset_imports == {"": 20}
    return onnx_ir.to_proto(made)


def ort(model, folder, level):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / "ort.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return onnx.load(folder / "ort.onnx")


def ort_as_it_is(model, folder):
    return ort(model, folder, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


KEEP = [external, json_text, textproto, shapes, ir, ir_inline, script_version, ort_as_it_is]


@pytest.mark.parametrize("tool", KEEP, ids=lambda tool: tool.__name__)
def test_what_keeps_annotations(tool, tmp_path):
    made = tool(annotated(), tmp_path)
    assert specs(made) == ALL
    assert [one.name for one in made.configuration] == ["tp"]
    load(made, strict=True)
    assert [one for one in validate(made) if one.severity == "error"] == []


def printed(model, folder):
    return onnx.parser.parse_model(onnx.printer.to_text(model))


def version(model, folder):
    return onnx.version_converter.convert_version(model, 20)


def ort_optimised(model, folder):
    return ort(model, folder, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def extracted(model, folder):
    return onnx.utils.Extractor(model).extract_model(["x"], ["y"])


def merged(model, folder):
    other = onnx.compose.add_prefix(annotated(), "b_")
    return onnx.compose.merge_models(model, other, io_map=[], prefix1="a_")


def prefixed(model, folder):
    return onnx.compose.add_prefix(model, "sub/")


def inlined(model, folder):
    return onnx.inliner.inline_local_functions(annotated(function=True))


def optimised(model, folder):
    return onnxscript.optimizer.optimize(model)


def told(model):
    """What `load` warns of, or "" if it has nothing to say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AnnotationWarning)
        load(model)
    return " ".join(str(one.message) for one in caught)


GONE, UNKNOWN = "structure.nothing", "structure.configuration-unknown"
NEITHER = "which it neither reads nor makes"
# tool, the specs that are left, whether the configuration is, what `load` warns of, a rule
LOSE = [
    (printed, set(), False, [], GONE),
    (version, set(), False, [], GONE),
    (ort_optimised, set(), True, ["configuration 'tp', but no node is annotated for it"], None),
    (extracted, ALL, False, ["'tp', which the model does not have: it has none"], UNKNOWN),
    (merged, None, False, ["'tp', which the model does not have",
     f"has a spec for 'w', {NEITHER}: it has 'a_x', 'a_w'"], None),
    (prefixed, ALL, True, [f"node 'sub/up' has a spec for 'w', {NEITHER}"],
     "structure.tensor-unknown"),
    (inlined, {("MatMul", "w"), ("MatMul", "h"), ("Relu", "a")}, True,
     [f"has a spec for 'a', {NEITHER}"], None),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "left", "configured", "messages", "rule"), LOSE)
def test_what_loses_annotations(tool, left, configured, messages, rule, tmp_path):
    made = tool(annotated(), tmp_path)
    if left is not None:
        assert specs(made) == left
    assert bool(made.configuration) == configured
    assert [one for one in messages if one not in told(made)] == []
    assert rule is None or rule in {one.rule for one in validate(made)}


def test_the_spec_of_what_is_folded_goes_without_a_warning(tmp_path):
    made = optimised(annotated(), tmp_path)
    assert specs(made) == ALL - {("MatMul", "w")}
    assert told(made) == "" and [one for one in validate(made) if one.severity != "info"] == []


TOOLS = (
    "onnx.printer onnx.version_converter onnx.utils.Extractor onnx.compose.merge_models "
    "onnx.compose.add_prefix onnx.inliner onnxscript.optimizer ORT_DISABLE_ALL InlinePass "
    "onnxscript.version_converter onnx.shape_inference"
).split()


def test_the_docs_name_every_tool_and_every_rule():
    page = (Path(__file__).resolve().parents[3] / "docs/onnx.md").read_text()
    assert [name for name in TOOLS if f"`{name}`" not in page] == []
    lines = [f"| `{name}` | {rule.severity} | {rule.meaning} |" for name, rule in RULES.items()]
    assert [line for line in lines if line not in page] == []
