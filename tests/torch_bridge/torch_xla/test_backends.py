"""backends: the precision of matrix products is part of a compiled program."""

from __future__ import annotations

import jax
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.export import lowered
from isoshard.torch_bridge.torch_xla import backends


@pytest.fixture(autouse=True)
def _restored():
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", None)
    yield
    jax.config.update("jax_default_matmul_precision", before)


def product() -> torch.Tensor:
    x = torch.arange(35.0).reshape(5, 7).to("jax")
    xs.sync()
    return x @ x.T


def test_it_is_read_back():
    assert backends.get_mat_mul_precision() == "default"
    for precision in ("high", "highest", "default"):
        backends.set_mat_mul_precision(precision)
        assert backends.get_mat_mul_precision() == precision
        assert jax.config.jax_default_matmul_precision == precision
    with pytest.raises(ValueError, match="one of default, high, highest, and it is 'float64'"):
        backends.set_mat_mul_precision("float64")
    for own, name in (("tensorfloat32", "high"), ("float32", "highest"), ("bfloat16", "default")):
        jax.config.update("jax_default_matmul_precision", own)
        assert backends.get_mat_mul_precision() == name
    jax.config.update("jax_default_matmul_precision", "F64_F64_F64")
    with pytest.raises(RuntimeError, match="'F64_F64_F64', which is none of"):
        backends.get_mat_mul_precision()


def test_it_takes_effect_and_compiles_again(counted):
    want = product().tolist()
    assert "HIGHEST" not in lowered.stablehlo([product()])
    xs.sync()
    compiled = counted("compilations")
    backends.set_mat_mul_precision("highest")
    assert "precision = [HIGHEST, HIGHEST]" in lowered.stablehlo([product()])
    assert product().tolist() == want
    assert counted("compilations") == compiled + 1
    causes = [compilation.cause for compilation in metrics.compilations()]
    assert causes[-1] == "matmul precision highest, before None"
    with jax.default_matmul_precision(None):
        product().tolist()
    product().tolist()
    assert counted("compilations") == compiled + 1  # both programs are kept


def test_a_compiled_step_notices(counted):

    @xs.compile
    def step(x):
        metrics.count("test.step")
        return x @ x

    x = torch.eye(3, device="jax")
    for precision, captured in (("default", 1), ("highest", 2), ("highest", 2), ("default", 2)):
        backends.set_mat_mul_precision(precision)
        assert torch.equal(step(x).cpu(), torch.eye(3))
        assert counted("test.step") == captured
    assert len(step.replays) == 2
    assert ["operand_precision={highest,highest}" in r.program.text() for r in step.replays] in (
        [False, True],
        [False, False],  # the CPU computes all products exactly, and forgets what was asked
    )
