"""JAX functions and modules taken apart: names of weights, inputs and results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.exporting.jax_functions import output_names, split_function

X = np.ones((2, 4), np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.up(x)))


def _same(taken, wanted):
    found = taken.function(*taken.weights.values(), *taken.inputs.values())
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_an_nnx_module_is_its_own_weights():
    model = Net(nnx.Rngs(0))
    model.eval()
    taken = split_function(model, (X,))
    assert {"up.kernel", "up.bias", "norm.scale", "norm.mean"} <= set(taken.weights)
    assert list(taken.inputs) == ["x"]
    assert taken.name == "Net"
    _same(taken, model(X))


def test_inputs_go_by_argument_and_path():
    def fn(batch, scale, *rest, power):
        return (batch["x"] + batch["more"][1] * scale + rest[0]) ** power

    args = ({"x": X, "more": [X, X]}, X, X)
    taken = split_function(fn, args, kwargs={"power": 2})
    assert list(taken.inputs) == ["batch.more.0", "batch.more.1", "batch.x", "scale", "input_2"]
    _same(taken, fn(*args, power=2))


@pytest.mark.parametrize(("results", "names"), [
    (1.0, ["output"]),
    ((1.0, [2.0]), ["output_0", "output_1.0"]),
    ({"x": 1.0, "logits": {"y": 2.0}}, ["logits.y", "x_1"]),
])  # fmt: skip
def test_results_go_by_their_paths(results, names):
    assert output_names(results, {"x"}) == names


def test_state_that_changes_is_refused():
    taken = split_function(Net(nnx.Rngs(0)), (X,))
    with pytest.raises(ModelError, match=r"Net changes its own state .* call model.eval\(\) first"):
        jax.make_jaxpr(taken.function)(*taken.weights.values(), X)


@pytest.mark.parametrize(("args", "params", "told"), [
    ((X, 2.0), {"w": X}, "input 'b': a float"),
    ((X, X), {"a": X}, "'a' is the name of several arrays"),
    ((X, X), {"w": jax.ShapeDtypeStruct((2,), "float32")}, "weight 'w' has no values"),
])  # fmt: skip
def test_what_has_no_name_or_value(args, params, told):
    with pytest.raises(ModelError, match=told):
        split_function(lambda p, a, b: a, args, params)


def test_weights_twice():
    with pytest.raises(ModelError, match="Net has weights of its own: export it without params"):
        split_function(Net(nnx.Rngs(0)), (X,), params={"w": jnp.ones(2)})
