"""Errors of steps that cannot be planned name the user's line and the fix."""

import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import Plan, PlanError
from isoshard.core.errors import CaptureError, ShardingError
from isoshard.core.frameworks import require
from isoshard.planner.machine.topologies import topology

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
X = torch.empty(8, 16, device="meta")
VALUE = (
    r"(?m)^test_errors.py:\d+ \(step\): the step needs the value of a tensor here .* has no data\. "
    r"Return the tensor from the step and read it outside; for a branch use torch\.where\.$"
)


def traced(step, *args, plan=None, mesh=MESH):
    return require("torch").traced_step(step, args, {}, mesh, plan)


def model():
    with torch.device("meta"):
        return torch.nn.Linear(16, 16)


MODEL = model()


def item(x):
    return MODEL(x).sum().item()


def branch(x):
    return x if MODEL(x).sum() > 0 else -x


def of_an_input(x):
    return x * float(x[0, 0])


def printed(x):
    print(MODEL(x))


def copied(x):
    return MODEL(x).detach().cpu()


def caught(x):
    try:
        return MODEL(x).sum().item()
    except Exception:
        return x


@pytest.mark.parametrize("step", [item, branch, of_an_input, printed, copied, caught])
def test_reading_a_value(step):
    step.__code__ = step.__code__.replace(co_name="step")
    with pytest.raises(CaptureError, match=VALUE):
        traced(step, X)


def test_a_batch_that_the_plan_does_not_split():
    with pytest.raises(PlanError, match=r"input: shape \(7, 16\) .* 2 shards\. Pad it to 8"):
        traced(MODEL.forward, torch.empty(7, 16), plan=Plan({"*": ()}, inputs=("data",)))


def test_a_plan_for_another_mesh():
    wrong = (
        r"weight: .* no mesh axis is called 'tp'\. The mesh axes are 'data' \(2\), 'model' \(4\)"
    )
    with pytest.raises(PlanError, match=wrong):
        traced(MODEL, X, plan=Plan({"weight": ("tp",), "*": ()}))
    mask = torch.ones(8, 16)
    with pytest.raises(CaptureError, match=r"pass it as an argument"):
        traced(lambda x: MODEL(x) * mask.to("jax"), X)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # the model's own
        traced(MODEL, torch.empty(8, 3))
    with pytest.raises(TypeError, match=r"step must be a function.* int"):
        traced(3, X)


def test_a_mark_on_a_mesh_with_other_axes():
    mesh = xs.Mesh(range(8), (8,), ("batch",))

    def step(x):
        return xs.mark_sharding(MODEL(x), mesh, ("batch", None))

    wrong = r"test_errors.py:\d+ \(step\): a tensor is marked with .*'batch'.* \('data', 'model'\)"
    with pytest.raises(ShardingError, match=wrong):
        traced(step, X)
