"""16-bit floats are added up in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.nn.precision import averaged, wide, wide_dtype


@pytest.mark.parametrize(
    ("dtype", "wider"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float32", "float32"),
        ("complex64", "complex64"),
        ("int8", "int8"),
        ("bool", "bool"),
    ],
)
def test_the_width_of_sums(dtype, wider):
    assert wide_dtype(jnp.dtype(dtype)) == wider
    x = jnp.ones(2, dtype)
    assert wide(x).dtype == wider
    assert (wide(x) is x) == (dtype == wider)


def test_the_mean_of_equal_numbers_is_that_number():
    for count in range(1, 30):
        assert float(averaged(jnp.full(count, 1.5))) == 1.5


def test_means_along_axes():
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(averaged(x, (0, -1), keepdims=True), x.mean((0, 2), keepdims=True))
    assert averaged(jnp.full(5000, 1, "bfloat16")).dtype == "bfloat16"
    assert jnp.isnan(averaged(jnp.zeros(0)))
