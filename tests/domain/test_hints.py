"""How even axes lie: what is known, what each primitive passes on, and what it loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import isoshard as iso
from isoshard import P
from isoshard.core.blocks.block_layout import BlockLayout, lay_in_blocks
from isoshard.core.lifting.lifting import lift

from .blocks import in_blocks

SIZES = (5, 2, 7, 4)
X = np.random.default_rng(0).normal(size=(4, 6, 18)).astype(np.float32)
DATA, NONE = P("data", None, "x"), P(None, None, "x")


@pytest.fixture
def mesh():
    """With Auto axes: along others a layout is never open, and a constraint is a check."""
    return iso.make_mesh((2, 4), ("data", "x"), axis_types=AxisType.Auto)


KEPT = {
    "elementwise": lambda x: jnp.where(x > 0, x, jnp.sin(x) * 2),
    "with a global array": lambda x: x + jnp.arange(18.0),
    "with its mean": lambda x: x - x.mean((0, 1), keepdims=True),
    "transpose": lambda x: jnp.tanh(x.transpose(1, 2, 0)).transpose(2, 0, 1),
    "reshape": lambda x: jnp.tanh(x.reshape(4, 2, 3, 18)).reshape(4, 6, 18),
    "new axes": lambda x: x[:, None][:, 0],
    "reduction": lambda x: x.max(1),
    "softmax": lambda x: jax.nn.softmax(x, 2),
    "slice": lambda x: x[:, 1:5, 2:16],
    "every other": lambda x: x[:, ::2],
    "dynamic slice": lambda x: lax.dynamic_slice(x, (0, x[0, 0, 0].astype(int), 0), (4, 2, 18)),
    "put into": lambda x: lax.dynamic_update_slice(x, x[:, :2], (0, 3, 0)),
    "put into rows": lambda x: x.at[:, :, 3:9].set(0.5),
    "concatenate": lambda x: jnp.concatenate([x, x * 2], 1),
    "concatenate rows": lambda x: jnp.concatenate([x, x * 2], 2),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 1), (2, 1))),
    "pad, edge": lambda x: jnp.pad(x, ((0, 0), (1, 1), (2, 1)), mode="edge"),
    "split": lambda x: jnp.split(x, 3, 2)[0],
    "flip": lambda x: x[:, ::-1, ::-1],
    "sort": lambda x: jnp.sort(x, 2),
    "take": lambda x: jnp.take(x, jnp.array([2, 0]), 1),
    "product": lambda x: jnp.einsum("bcx,cd->bdx", x, jnp.ones((6, 5))),
    "batched product": lambda x: jnp.einsum("bcx,bdx->bcdx", x, x)[:, 0],
    "cumsum": lambda x: jnp.cumsum(x, 2),
    "conv": lambda x: lax.conv_general_dilated(x, jnp.ones((3, 6, 3)), (2,), [(1, 1)]),
    "windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 3), (1, 1, 2), "SAME"),
    "fft": lambda x: jnp.fft.fft(x, axis=1).real,
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "custom derivative": lambda x: jax.nn.relu(x),
    "gradient": jax.grad(lambda x: (jax.nn.softplus(x) ** 2).sum()),
    "branch": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
    "loop": lambda x: lax.fori_loop(0, 2, lambda i, y: jnp.sin(y), x),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), x[:, 0], x.swapaxes(0, 1))[0],
    "operator": lambda x: iso.domain.conv(x, jnp.ones((3, 6, 3)), padding=1),
}
LOST = {
    "rows of the batch": lambda x: x[1:3],
    "batch merged": lambda x: x.reshape(24, 18),
    "batch sorted": lambda x: jnp.sort(x, 0),
    "batch summed": lambda x: x.sum(0),
}


def laid(functions, mesh, x=X, spec=DATA):
    """The results of some functions, and their specs inside of the program."""
    specs = {}

    def all_of_them(x):
        return {name: function(x) for name, function in functions.items()}

    def told(u):
        results = lift(all_of_them)(u)
        specs.update({name: result.layout.spec for name, result in results.items()})
        return results

    found = jax.jit(told)(in_blocks(x, mesh, spec, (None, None, SIZES)))
    return found, specs


def test_what_passes_it_on_and_what_loses_it(mesh):
    found, specs = laid({**KEPT, **LOST}, mesh)
    wrong = {name for name in KEPT if "data" not in tuple(specs[name])}
    wrong |= {name for name in LOST if "data" in tuple(specs[name])}
    assert not wrong
    for name, result in found.items():
        if name not in LOST:
            assert result.sharding.spec == specs[name], name


def test_marks_tell_it_and_take_it_back(mesh):
    free = P.UNCONSTRAINED
    layout = BlockLayout.plan(X.shape, mesh, DATA, (None, None, SIZES))

    def mark(x, *entries):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))

    told = {
        "marked": lambda x: jnp.sin(mark(x, "data", None, free)),
        "marked elsewhere": lambda x: jnp.sin(mark(x, None, "data", free)),
        "in blocks": lambda x: jnp.sin(lay_in_blocks(x, layout)),
    }
    _, specs = laid(told, mesh, spec=NONE)
    assert specs == {"marked": DATA, "marked elsewhere": P(None, "data", "x"), "in blocks": DATA}
    _, specs = laid({"whole": lambda x: jnp.sin(mark(x, None, None, free))}, mesh)
    assert specs == {"whole": NONE}
