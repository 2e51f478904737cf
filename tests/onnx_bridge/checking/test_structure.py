"""Each broken file gives its finding, though ONNX's checker accepts it."""

import onnx
import pytest

from isoshard.onnx_bridge import AnnotationError, validate
from isoshard.onnx_bridge.checking import RULES
from tests.onnx_bridge.checking import broken


def test_the_sound_model_gives_nothing():
    assert validate(broken.sound()) == []


def test_there_are_twenty_three():
    assert len(broken.BROKEN) == 23


@pytest.mark.parametrize(("rule", "change"), broken.BROKEN)
def test_onnx_accepts_it_and_validate_does_not(rule, change):
    model = broken.sound()
    change(model)
    onnx.checker.check_model(model, full_check=True)
    found = [finding for finding in validate(model) if finding.rule == rule]
    assert found, [str(finding) for finding in validate(model)]
    assert all(finding.severity == "error" for finding in found)


@pytest.mark.parametrize(("rule", "change"), broken.MORE)
def test_more_that_validate_finds(rule, change):
    model = broken.sound()
    change(model)
    assert rule in {finding.rule for finding in validate(model)}


def test_a_finding_names_its_place():
    model = broken.sound()
    broken.broken("structure.axis-range")(model)
    (finding,) = [one for one in validate(model) if one.severity == "error"]
    assert (finding.node, finding.tensor, finding.axis) == ("up", "w", 7)
    assert finding.configuration == "tp"
    assert str(finding) == (
        "error   structure.axis-range: node 'up', tensor 'w', axis 7: the tensor has axes -2 to 1"
    )


def test_annotations_in_functions_and_inner_graphs_are_looked_at():
    model = broken.sound()
    node = onnx.helper.make_node("Relu", ["a"], ["b"])
    node.device_configurations.add(configuration_id="nowhere")
    opset = onnx.helper.make_opsetid("", 18)
    model.functions.append(onnx.helper.make_function("mine", "F", ["a"], ["b"], [node], [opset]))
    (finding,) = validate(model)
    assert finding.rule == "structure.configuration-unknown"
    assert "Relu that makes 'b'" in finding.node


def test_errors_come_first_and_a_configuration_can_be_chosen():
    model = broken.sound()
    model.configuration.add(name="other", num_devices=2)
    broken.broken("structure.device-unknown")(model)
    assert [one.severity for one in validate(model)] == ["error", "warning"]
    assert [one.rule for one in validate(model, "other")] == ["structure.configuration-unused"]
    with pytest.raises(AnnotationError, match="no configuration 'third'; it has 'tp', 'other'"):
        validate(model, "third")


def test_every_structural_rule_is_shown_by_a_broken_model():
    shown = {rule for rule, _ in (*broken.BROKEN, *broken.MORE)}
    elsewhere = {"structure.stage-order"}  # tests/onnx_bridge/checking/test_semantics.py
    assert {rule for rule in RULES if rule.startswith("structure.")} <= shown | elsewhere
