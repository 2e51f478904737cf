"""`iso.metrics.clear_caches` lets programs go, and all that runs afterwards is as before."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.loops.scanning import scan


def _results(step, model, mesh, scale):
    """What a compiled step, a recorded one, a JAX function, a scan and a layout give."""
    x = xs.mark_sharding(torch.arange(32.0, device="jax").reshape(8, 4), mesh, ("x", None))
    loss = step(x)
    scanned, rows = scan(lambda c, row: (c + row, c * row), x[0], x)
    array = iso.shard(jnp.arange(8.0), mesh, jax.P("x"))
    values = (loss, model(x).sum(), scale(x), scanned, rows, iso.to_torch(array))
    return [value.detach().cpu().numpy() for value in values]


def test_everything_is_computed_again_after_clearing():
    torch.manual_seed(0)
    mesh = iso.make_mesh((4,), ("x",))
    model = torch.nn.Linear(4, 4).to("jax")
    step = xs.compile(lambda x: torch.nn.functional.gelu(model(x)).square().mean())
    scale = iso.torch_function(lambda x: jnp.tanh(x) * 2)
    before = _results(step, model, mesh, scale)
    assert iso.metrics.cache_sizes()["engine: compiled programs"].entries > 2
    alive = [weakref.ref(one) for one in program._PROGRAMS.values()]
    iso.metrics.clear_caches()
    gc.collect()
    left = [one() for one in alive if one() is not None]
    assert left == [replay.program for replay in step.replays]
    compiled = iso.metrics.counters()["compilations"]
    for _ in range(2):
        for again, first in zip(_results(step, model, mesh, scale), before, strict=True):
            np.testing.assert_array_equal(again, first)
    assert iso.metrics.counters()["compilations"] > compiled


def test_training_goes_on_after_clearing():
    def train(clears):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)]).to("jax")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        @xs.compile(repeat="always")
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = []
        for n in range(6):
            if clears and n in (1, 3, 4):
                iso.metrics.clear_caches()
            losses.append(step(torch.full((2, 8), 0.5 + n, device="jax")).item())
        return losses

    assert train(True) == train(False)
