"""torch to a file with DP x TP and two stages; from the file, in a new process, to 8 devices."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks import collectives
from isoshard.onnx_bridge import validate
from tests import fresh
from tests.onnx_bridge.exports import CASES

SCRIPT = Path(__file__).with_name("fresh_process.py")


@pytest.fixture(scope="module")
def ran(exported, tmp_path_factory):
    """Every case, saved, loaded and run by a process from which torch was taken."""
    folder = tmp_path_factory.mktemp("models")
    for name in CASES:
        one = exported(name)
        onnx.save_model(one.model, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.npz", **one.inputs)
    done = fresh.run(SCRIPT, [str(folder)], cwd=folder)
    assert done.returncode == 0, done.stderr
    return lambda name: (
        np.load(folder / f"{name}.npy"),
        json.loads((folder / f"{name}.json").read_text()),
    )


@pytest.mark.parametrize("name", CASES)
def test_equal_to_torch(name, exported, ran):
    result, _ = ran(name)
    np.testing.assert_allclose(result, exported(name).wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_each_device_holds_what_the_plan_says(name, exported, ran):
    one, (_, found) = exported(name), ran(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in one.module.state_dict().items()}
    planned = one.case.plan.resolve(shapes, one.mesh).shardings
    origins = _origins(one)
    for stage, held in enumerate(found["pieces"]):
        assert held
        for tensor, pieces in held.items():
            weight, axes = origins[tensor]
            shard = planned[weight].shard_shape(shapes[weight])
            whole = one.model.graph.initializer
            dims = next(list(t.dims) for t in whole if t.name == tensor)
            wanted = [
                size if axis is None else shard[axis] for axis, size in zip(axes, dims, strict=True)
            ]
            devices = range(4 * stage, 4 * stage + 4)
            assert pieces == {str(device): wanted for device in devices}, tensor


@pytest.mark.parametrize("name", CASES)
def test_the_collectives_are_those_of_the_layout(name, exported, ran):
    _, found = ran(name)
    summaries = map(collectives.summarize, found["hlo"])
    counts = [{kind: count for kind, (count, _) in one.items()} for one in summaries]
    assert counts == exported(name).case.collectives


def _origins(one):
    from isoshard.onnx_bridge import parameters_of

    return parameters_of(one.model)


@pytest.mark.parametrize("name", CASES)
def test_what_we_export_has_no_error_in_our_own_check(name, exported):
    findings = validate(exported(name).model)
    assert findings
    assert not [finding for finding in findings if finding.severity == "error"]
