"""Singular vectors on a TPU: float32 is computed in float64, all else is what it was."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from isoshard.torch_bridge.lowerings import linalg

A = np.arange(12, dtype="float32").reshape(4, 3) ** 1.5


@pytest.mark.parametrize("full", [False, True])
def test_the_wider_one_gives_the_same(full):
    with jax.enable_x64(True):
        usual = linalg.svd(jnp.asarray(A), full_matrices=full)
        chosen = lambda *given, tpu, default: tpu(*given)  # noqa: E731
        with mock.patch.object(lax, "platform_dependent", chosen):
            wider = linalg.svd(jnp.asarray(A), full_matrices=full)
    assert [part.dtype for part in wider] == [np.float32] * 3
    assert [part.shape for part in wider] == [part.shape for part in usual]
    np.testing.assert_allclose(wider[1], usual[1], rtol=1e-5, atol=1e-4)
    rank = (wider[0][:, :3] * wider[1]) @ wider[2]
    np.testing.assert_allclose(rank, A, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "wide"), [("float32", {"tpu"}), ("complex64", set())])
def test_only_float32_on_a_tpu_is_wider(dtype, wide):
    for platform in ("cpu", "tpu"):
        with jax.enable_x64(True):
            function = jax.jit(lambda a: linalg.svd(a, full_matrices=False))
            anything = [export.DisabledSafetyCheck.custom_call("ALL")]
            made = export.export(function, platforms=[platform], disabled_checks=anything)
            text = made(jax.ShapeDtypeStruct((4, 3), dtype)).mlir_module()
        assert ("4x3xf64" in text) == (platform in wide), platform
