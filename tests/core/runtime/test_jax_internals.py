"""Each private name of JAX, called as isoshard calls it."""

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import PrivateNameError
from isoshard.core.layout import custom_partitioning
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.runtime import _jax_internals as internals
from isoshard.core.runtime._jax_internals import jaxpr_classes
from isoshard.core.runtime.private_names import PrivateNames

ROWS = {row.path: row for row in internals.NAMES}


def test_a_layout_of_the_compilers_is_said_in_the_names_of_a_mesh():
    """`parse_flatten_op_sharding` and `_hlo_sharding`, on what XLA's partitioner hands out."""
    seen = []

    def split(_told, mesh, operands, results):
        seen.append(operands[0].sharding.spec)
        return mesh, lambda x: x + 1, operands[0].sharding, (operands[0].sharding,)

    added = custom_partitioning.partitioned(
        lambda _told, x: x + 1, split, lambda _told, shapes: ("i j -> i j", {})
    )
    mesh = make_mesh((2, 4), ("x", "y"))
    layout = NamedSharding(mesh, P("y", "x"))
    x = jax.device_put(np.zeros((8, 2), np.float32), layout)
    result = jax.jit(lambda x: added((), x))(x)
    assert seen == [P("y", "x")] and result.sharding.is_equivalent_to(layout, 2)


def test_values_of_a_class_are_refused():
    """`pytype_aval_mappings`, by every way into JAX."""

    class Odd:
        """Nothing that JAX knows."""

    def refuse(_):
        raise RuntimeError("no array")

    for use in (jax.jit(lambda x: x), jax.device_put, jax.vmap(lambda x: x), jax.eval_shape):
        given = (Odd(),) if use is not jax.eval_shape else (lambda x: x, Odd())
        with pytest.raises(TypeError):
            use(*given)
        internals.refuse_values(Odd, refuse)
        try:
            with pytest.raises(RuntimeError, match="no array"):
                use(*given)
        finally:
            del internals._kinds_of_values[Odd]


def test_the_devices_have_started():
    jax.devices()
    assert internals.devices_have_started() is True
    code = (
        "from isoshard.core.runtime import _jax_internals as i; print(i.devices_have_started());"
        "import jax; jax.devices(); print(i.devices_have_started())"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert got.stdout.split() == ["False", "True"], got.stderr


def test_the_state_of_processes():
    state = internals.distributed_state
    assert (state.process_id, state.num_processes, state.client) == (0, 1, None)
    assert state.coordinator_address is None


def test_lines_of_source_are_left_out_in_one_thread():
    import threading

    texts = {}

    def lower(name, silence):
        if silence:
            internals.without_locations()
        texts[name] = jax.jit(lambda x: x * 2).lower(1.0).as_text(debug_info=True)

    for name in (True, False):
        thread = threading.Thread(target=lower, args=(name, name))
        thread.start()
        thread.join(60)
    assert "test_jax_internals.py" in texts[False]
    assert "test_jax_internals.py" not in texts[True]


def test_the_key_without_addresses():
    with internals.cached_without_addresses():
        assert internals._nameless_key.value is True
    assert internals._nameless_key.value is False


def test_a_primitive_is_told_the_devices():
    primitive = jaxpr_classes.Primitive("of_this_test")
    internals.needs_devices(primitive)
    assert primitive in internals._asking_for_devices
    internals._asking_for_devices.discard(primitive)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_name_is_there(row):
    assert row.found() is not None
    assert str(row.error()).startswith(f"jax {jax.__version__} has no {row.path}, which ")


@pytest.fixture
def table():
    return PrivateNames("numpy", known="1.26 to 2.4")


WORDS = {"why": "does it", "without": "it is not done"}


def test_a_missing_name_says_so_at_each_use(table):
    gone = table.bind("numpy._gone.of_it", **WORDS)
    uses = [
        gone, lambda: gone.attribute, lambda: isinstance(1, gone), lambda: list(gone),
        lambda: gone[0], lambda: 1 in gone, lambda: type("Sub", (object,), {})() in gone,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(PrivateNameError, match=r"numpy .* has no numpy\._gone\.of_it, which"):
            use()
    with pytest.raises(PrivateNameError, match=r"1\.26 to 2\.4 are known to have it"), gone:
        pass

    class Sub(gone):
        pass

    with pytest.raises(PrivateNameError, match="which does it: it is not done"):
        Sub(1, two=2)


def test_a_missing_name_may_have_a_substitute(table):
    assert table.bind("numpy._gone", otherwise=7, **WORDS) == 7
    row = table.state("numpy._gone_too", known="3.0", **WORDS)
    assert row.found(None) is None and row.of(object(), 3) == 3
    with pytest.raises(PrivateNameError, match=r"numpy 3\.0 are known"):
        row.of(object())
    with pytest.raises(PrivateNameError):
        row.wrap(lambda it: it)


def test_a_field_is_read_and_its_absence_told(table):
    size = table.field("numpy.dtype.itemsize", example=lambda: np.dtype("int8"), **WORDS)
    assert size(np.dtype("int32")) == 4
    gone = table.field("numpy.dtype._gone", example=lambda: np.dtype("int8"), **WORDS)
    with pytest.raises(PrivateNameError, match=r"has no numpy\.dtype\._gone"):
        gone(np.dtype("int32"))


def test_a_row_is_stated_once_and_of_its_package(table):
    table.state("numpy._one", **WORDS)
    with pytest.raises(ValueError, match=r"numpy\._one was stated before"):
        table.state("numpy._one", **WORDS)
    with pytest.raises(ValueError, match=r"torch\._one is no name of numpy"):
        table.state("torch._one", **WORDS)


def test_a_name_is_wrapped_in_its_place(table, monkeypatch):
    monkeypatch.setattr(np, "_of_this_test", lambda: 1, raising=False)
    row = table.state("numpy._of_this_test", **WORDS)
    row.wrap(lambda before: lambda: before() + 1)
    assert np._of_this_test() == 2
