"""Writes at a mask of another number of values than places: torch's error, now or at the read."""

from __future__ import annotations

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.engine.recording import deferred_checks


def put(x, mask, values):
    x[mask] = values
    return x


def columns(x, mask, values):
    x = x.reshape(1, -1).repeat(2, 1)
    x[:, mask] = values
    return x


def scattered(x, mask, values):
    return x.masked_scatter_(mask, values)


def wide(x, mask, values):
    return torch.masked_scatter(x, mask, values[:1].repeat(2)).repeat(2, 1)


def rows(x, mask, values):
    return torch.stack([x, x], 1).index_put((mask,), torch.stack([values, values], 1))


WRITES = {
    "put": (put, "shape mismatch: value tensor"),
    "columns": (columns, "shape mismatch: value tensor"),
    "rows": (rows, "shape mismatch: value tensor"),
    "masked_scatter_": (scattered, "Number of elements of source < number of ones in mask"),
    "masked_scatter": (wide, "Number of elements of source < number of ones in mask"),
}
PLACES = (0, 2, 4)  # of five


def case(dtype, device, least=3):
    x = torch.arange(5, device=device).to(dtype)
    values = torch.arange(10, 13, device=device).to(dtype)[:2]
    return x, values, torch.tensor([1, 0, 1, 0, 1], device=device)


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_fewer_values_than_places(kind, dtype):
    write, why = WRITES[kind]
    for device in ("cpu", "jax"):
        x, values, hit = case(dtype, device)
        with pytest.raises(RuntimeError, match=why):  # the mask is in host memory: at the call
            write(x, torch.tensor([True, False, True, False, True], device=device), values)
        if device == "cpu":
            with pytest.raises(RuntimeError, match=why):
                write(x, hit > 0, values)
            continue
        got = write(x, hit > 0, values)  # the program counts
        with pytest.raises(RuntimeError, match=rf"{why}.*in the write at test_mask_counts.py:\d+"):
            (got + 1).tolist()
        assert torch.ones(2, device="jax").tolist() == [1, 1]  # it is told once


@pytest.mark.parametrize("kind", WRITES)
def test_as_many_values_as_places(kind):
    write, _ = WRITES[kind]
    results = []
    for device in ("cpu", "jax"):
        x, values, hit = case(torch.float32, device)
        results.append(write(x, (hit > 0) & (x < 3), values).tolist())
    assert results[0] == results[1]


def test_more_values_than_the_mask_has_elements():
    x = torch.zeros(2, device="jax")
    with pytest.raises(RuntimeError, match=r"result of shape \[\(how many the mask has\)\]"):
        x[x > 1] = torch.ones(3, device="jax")


def test_no_values():
    x = torch.zeros(2, device="jax")
    x[x > 1] = torch.ones(0, device="jax")
    x[x < 1] = torch.ones(0, device="jax")
    with pytest.raises(RuntimeError, match=r"shape \[0\] cannot be .* result of shape \[2\]"):
        x.tolist()


def test_without_a_read_the_waiting_checks_are_few():
    x, hit = torch.zeros(4, device="jax"), torch.ones(4, device="jax")
    for _ in range(deferred_checks.MOST + 2):
        x[hit > 0] = torch.ones(4, device="jax")
        xs.sync()
    assert len(deferred_checks._WAITING.checks) <= 2
    x[hit > 0] = torch.ones(3, device="jax")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        xs.sync(wait=True)


@pytest.mark.parametrize("repeat", [None, "auto"])
def test_in_compiled_steps(repeat):
    @xs.compile(repeat=repeat)
    def step(x, mask, values):
        x = x * 2
        x[mask] = values
        return x.sum()

    x, values = torch.arange(5, device="jax"), torch.arange(10, 12, device="jax")
    masks = [torch.tensor(bits, device="jax") > 0 for bits in ([1, 0, 1, 0, 0], [1, 1, 1, 0, 0])]
    for mask, fits in [(masks[0], True), (masks[1], False)] * 2:
        total = step(x, mask, values)
        if fits:
            assert total.item() == 37
            continue
        with pytest.raises(RuntimeError, match="shape mismatch"):
            total.item()
    assert len(step._replays) == 1


def test_in_a_step_that_is_not_replayed():
    seen = []

    @xs.compile
    def step(x):
        seen.append(1)
        x[x > 0] = torch.ones(3, device="jax", dtype=x.dtype)

    x = torch.arange(3, device="jax")
    step(x)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        x.tolist()


def test_on_a_mesh(mesh):
    x = iso.shard(torch.arange(8), mesh, P("y"))
    x[x > 5] = torch.tensor([1, 2], device="jax")
    assert x.tolist() == [0, 1, 2, 3, 4, 5, 1, 2]
    x[x < 2] = torch.tensor([1, 2], device="jax")
    with pytest.raises(RuntimeError, match="shape mismatch"):
        x.tolist()


def test_what_was_never_computed_is_not_checked():
    x = torch.zeros(2, device="jax")
    x[x == 0] = torch.ones(3, device="jax")[1:]
    del x
    assert torch.ones(1, device="jax").item() == 1


def test_traced_by_jax_another_number_is_nan():
    f = iso.jax_function(lambda x, values: put(x, x > 0, values))
    import jax

    got = jax.jit(f)(jax.numpy.arange(3.0), jax.numpy.ones(3))
    assert jax.numpy.isnan(got).tolist() == [False, True, True]
