"""One operation that fails takes with it what depends on it, and nothing else."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from jax.extend.core import Primitive

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.engine.recording import tape

_NEVER_LOWERED = Primitive("never_lowered")
_NEVER_LOWERED.def_abstract_eval(lambda x: x)


def _refuses(_):
    raise ValueError("not today")


def at_run_time(x):
    return jax.pure_callback(_refuses, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def at_lowering(x):
    return _NEVER_LOWERED.bind(x)


KINDS = {at_run_time: jax.errors.JaxRuntimeError, at_lowering: NotImplementedError}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def failing(request):
    """A function that fails, and the error."""
    return iso.torch_function(request.param), KINDS[request.param]


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3))


def test_what_does_not_depend_on_it_is_computed_whatever_is_asked_for_first(failing):
    function, kind = failing
    host = numbers(3, 4)
    for bad_first in (False, True) if kind is NotImplementedError else (True,):
        x = host.to("jax")
        before = x * 2
        bad = function(before)
        worse = (bad + before).sum()
        after = before - x.exp()
        if bad_first:
            with pytest.raises(kind):
                bad.cpu()
        torch.testing.assert_close(after.cpu(), host * 2 - host.exp())
        torch.testing.assert_close(before.cpu(), host * 2)
        for lost in (worse, bad, worse):
            with pytest.raises(kind) as raised:
                lost.cpu()
            (note,) = raised.value.__notes__
            assert getattr(function, "name", "at_") in note
            assert "test_failing_program.py:" in note


def test_memory_written_before_and_after_is_as_it_should_be(failing):
    """An input that is overwritten in the failing program is not lost with it."""
    function, kind = failing
    host = numbers(64)
    weight = host.to("jax")
    xs.sync()
    weight.mul_(3)
    bad = function(weight)
    weight.add_(1)
    with pytest.raises(kind):
        bad.cpu()
    torch.testing.assert_close(weight.cpu(), host * 3 + 1)
    with torch.no_grad():
        weight.sub_(1)
    torch.testing.assert_close(weight.cpu(), host * 3)


def test_sync_raises_after_everything_else_is_computed(failing):
    function, kind = failing
    host = numbers(3, 4)
    x = host.to("jax")
    bad, good = function(x), x + 1
    with pytest.raises(kind):
        xs.sync()
    assert good._storage.value.array is not None
    torch.testing.assert_close(good.cpu(), host + 1)
    xs.sync()
    for use in (bad.cpu, lambda: (bad + 1).cpu(), lambda: print(bad)):
        with pytest.raises(kind):
            use()


def test_two_failures_in_one_program(failing):
    function, kind = failing
    host = numbers(5)
    x = host.to("jax")
    many = [x * n for n in range(1, 5)]
    lost = [function(many[1]), function(many[3]) + many[0]]
    sums = [one.sum() for one in many]
    for n, total in enumerate(sums, 1):
        torch.testing.assert_close(total.cpu(), (host * n).sum(), rtol=1e-4, atol=1e-5)
    for one in lost:
        with pytest.raises(kind):
            one.cpu()


def test_a_lowering_that_raises():
    """An error while the program is traced tells the operation."""
    x = torch.ones(4).to("jax")
    xs.sync()
    real = tape.Recipe("sound", lambda inputs, _scalars, _key: [inputs[0] + 1], 1)

    def raises(inputs, _scalars, _key):
        raise KeyError("of the lowering")

    fails = tape.Recipe("unsound", raises, 1)
    here = tape.recorder()
    good = here.record(real, (x._storage.value,))[0]
    bad = here.record(fails, (good,))[0]
    tape.materialize([good])
    assert np.asarray(good.array).tolist() == [2, 2, 2, 2]
    with pytest.raises(KeyError, match="of the lowering") as raised:
        tape.materialize([bad])
    assert any("unsound" in note for note in raised.value.__notes__)


def test_random_numbers_and_constants_are_those_of_the_whole_program():
    function, kind = iso.torch_function(at_lowering), KINDS[at_lowering]

    def draws(fails: bool) -> torch.Tensor:
        torch.manual_seed(5)
        x = torch.ones(64).to("jax")
        first = torch.nn.functional.dropout(x * 0.5, 0.3)
        bad = function(first * 0.25) if fails else first * 0.25
        second = torch.nn.functional.dropout(x * 0.125, 0.6)
        found = second.cpu()
        if fails:
            with pytest.raises(kind):
                bad.cpu()
        return found

    torch.testing.assert_close(draws(True), draws(False))


def test_memory_that_does_not_suffice_is_no_operations_fault(monkeypatch):
    from isoshard.torch_bridge.engine.compiling import program

    x = torch.ones(4).to("jax")
    xs.sync()
    y, z = x + 1, x + 2

    def exhausted(*_given, **_named):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(program, "run", exhausted)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            y.cpu()
    assert y.tolist() == [2, 2, 2, 2]
    assert z.tolist() == [3, 3, 3, 3]
