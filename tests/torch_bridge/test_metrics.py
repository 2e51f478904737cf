"""What the engine tells: causes of compilations, transfers with their line, memory, warnings."""

import inspect
import logging
import time
import warnings

import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, metrics
from isoshard.torch_bridge.engine.compiling import long_compilations, program, recompile_reasons


@pytest.fixture(autouse=True)
def _clean():
    xs.sync()
    metrics.reset()
    yield
    metrics.reset()


def here(offset: int) -> str:
    """`file:line` of the caller, `offset` lines away."""
    frame = inspect.currentframe().f_back
    return f"test_metrics.py:{frame.f_lineno + offset}"


def test_transfers_name_the_line_that_made_them():
    x = torch.ones(4, 8).to("jax")
    up = here(-1)
    (x + 1).tolist()
    down = here(-1)
    moved = {(t.direction, t.where): (t.buffers, t.size) for t in metrics.transfers()}
    assert moved["host_to_device", up] == (1, 128)
    assert moved["device_to_host", down] == (1, 128)
    assert f"  {up}  host_to_device  1 buffer  128 B" in metrics.report()


def test_transfers_of_one_line_add_up():
    x = torch.ones(2).to("jax")
    for _ in range(3):
        x.sum().item()
    (read,) = [t for t in metrics.transfers() if t.direction == "device_to_host"]
    assert (read.buffers, read.size) == (3, 12)


def test_numbers_that_change_are_transfers_too():
    weight = torch.ones(4, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for rate in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(4, device="jax")
        optimizer.step()
        optimizer.zero_grad()
        xs.sync()
    assert any(t.where == "(changing floats)" for t in metrics.transfers())


def test_peak_bytes_are_those_of_one_device():
    mesh = iso.make_mesh((8,), ("x",))
    x = iso.shard(torch.ones(64, 128), mesh, P("x"))
    (x * 2).sum().item()
    share = 64 * 128 * 4 // 8
    assert share <= metrics.counters()["peak_bytes"] < 4 * share
    assert "peak_bytes" in metrics.report()


@pytest.mark.parametrize(("change", "cause"), [
    (lambda x: (x[:3], 2.0), "new shape or static argument in view"),
    (lambda x: (torch.ones(5, 8, device="jax"), 2.0), "new input shape or dtype: float32"),
    (lambda x: (x, 3.0), None),
])  # fmt: skip
def test_a_compilation_tells_its_cause_and_line(change, cause):
    x = torch.ones(4, 8, device="jax")
    xs.sync()

    def work(x, factor):
        return torch.addcmul(x, x, x, value=factor).relu().sum()

    work(x, 2.0).item()
    work(x[:2], 2.0).item()
    y, factor = change(x)
    xs.sync()
    before = len(metrics.compilations())
    work(y, factor).item()
    line = here(-1)
    found = metrics.compilations()[before:]
    if cause is None:
        assert not found  # a factor is an input, not a constant
    else:
        assert found[0].cause.startswith(cause)
        assert found[0].where == line


def test_a_family_of_programs_that_only_grows_is_warned_of(monkeypatch):
    monkeypatch.setattr(recompile_reasons, "MANY", 3)
    monkeypatch.setattr(recompile_reasons, "LONG", 0.0)
    monkeypatch.setattr(recompile_reasons, "_FAMILIES", {})
    with pytest.warns(iso.RecompilationWarning, match=r"3 programs .* keep what grows on the CPU"):
        for size in range(2, 10, 2):
            torch.ones(size).to("jax").erfinv().sum().item()


def test_an_input_that_grows_by_one_is_warned_of_at_the_third_program(monkeypatch):
    monkeypatch.setattr(recompile_reasons, "_FAMILIES", {})
    cache = torch.ones(3, 4).to("jax")
    tokens = [torch.ones(1, 4).to("jax") for _ in range(3)]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for number, token in enumerate(tokens):
            cache = torch.cat([cache, token])
            cache.expm1().sum().item()
            assert len(record) == (number == 2)
    text = str(record[0].message)
    assert (
        "3 programs of the same" in text and "[5, 4], before float32[4, 4], longer by one" in text
    )
    assert "static cache" in text and "transformers.StaticCache" in text


def test_a_compilation_that_takes_long_is_on_the_log(monkeypatch, caplog):
    monkeypatch.setattr(long_compilations, "SECONDS", 0.0)
    build = program.custom_partitioning.compiled

    def compiled(*args):
        while not caplog.records:  # the line of its size comes before it ends
            time.sleep(0.01)
        return build(*args)

    monkeypatch.setattr(program.custom_partitioning, "compiled", compiled)
    with caplog.at_level(logging.WARNING, logger="isoshard"):
        torch.ones(7).to("jax").sinh().cosh().sum().item()
    where = here(-1)
    size, done = (record.getMessage() for record in caplog.records)
    assert where in size and "compiling a program of 4 operations, for 0 s so far" in size
    assert where in done and "the program of 4 operations was compiled in" in done


def test_compiled_programs_are_bounded(monkeypatch):
    monkeypatch.setattr(program, "KEPT", 2)
    monkeypatch.setattr(program, "_PROGRAMS", {})
    for size in range(2, 12, 2):
        np.testing.assert_allclose(torch.full((size,), 2.0).to("jax").log2().numpy(), 1.0)
    assert len(program._PROGRAMS) == 2
    assert metrics.counters()["evictions"] == 3


def test_programs_go_before_the_system_has_no_room_left(monkeypatch):
    monkeypatch.setattr(program, "_PROGRAMS", {})
    for size in range(2, 10, 2):
        torch.full((size,), 2.0).to("jax").exp2().sum().item()
    before = len(program._PROGRAMS)
    monkeypatch.setattr(program, "MAP_SHARE", 0.0)
    torch.full((7,), 2.0).to("jax").exp2().sum().item()
    assert len(program._PROGRAMS) == before // 2 + 1
    assert metrics.counters()["evictions"] == before - before // 2


def test_the_cause_names_the_operations_that_differ():
    def run(count, *last):
        x = torch.ones(9, device="jax")
        for name in (*["sin", "neg"] * count, *last):
            x = getattr(x, name)()
        float(x.sum())
        return iso.metrics.compilations()[-1].cause

    run(9, "cos")
    assert run(9, "tan").endswith(": 1 aten::tan more, 1 aten::cos less")
    assert run(11, "cos").endswith(": 2 aten::sin more, 2 aten::neg more")
    assert "the same in another order, from number" in run(10, "neg", "sin", "cos")
