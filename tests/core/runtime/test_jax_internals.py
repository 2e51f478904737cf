"""Each private name of JAX, called as isoshard calls it."""

import contextlib
import importlib
import pkgutil

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from isoshard.core.errors import PrivateNameError
from isoshard.core.runtime import _jax_internals as internals
from isoshard.core.runtime._jax_internals import (
    jaxpr_classes,
    primitive_rules,
    undocumented,
)
from isoshard.core.runtime.primitives import new_primitive
from isoshard.core.runtime.private_names import Absent, PrivateNames, is_tried, or_absent

for module in pkgutil.iter_modules(internals.__path__):
    importlib.import_module(f"{internals.__name__}.{module.name}")
ROWS = {row.path: row for row in internals.NAMES}


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
        internals.reject_values(Odd, refuse)
        try:
            with pytest.raises(RuntimeError, match="no array"):
                use(*given)
        finally:
            del internals._kinds_of_values[Odd]


@pytest.fixture
def hidden(monkeypatch):
    """The values of rows as if their names were gone."""

    def hide(module, *names):
        for name in names:
            gone = Absent(name, lambda name=name: PrivateNameError(f"has no {name}"))
            monkeypatch.setattr(module, name, gone)

    return hide


def test_keys_spaces_and_linear_calls():
    assert str(undocumented.key_impl(jax.random.key(0))) == "threefry2x32"
    assert undocumented.Space is jax.memory.Space is undocumented.class_of_spaces()
    tripled = undocumented.linear_call(lambda _, x: x * 3, lambda _, y: y * 5, None, 2.0)
    assert tripled == 6.0
    given = jax.linear_transpose(
        lambda x: undocumented.linear_call(lambda _, x: x * 3, lambda _, y: y * 5, None, x), 2.0
    )
    assert given(1.0) == (5.0,)


def halved(**rules):
    return new_primitive("halved", lambda x: x / 2, lambda x: x, **rules)


def test_a_primitive_has_all_its_rules():
    primitive = halved(
        transpose=lambda slope, x: [slope * 10],
        batch=lambda arrays, axes: (arrays[0] / 2 + 100, axes[0]),
    )
    x = jnp.arange(4.0)
    assert primitive.bind(x).tolist() == jax.jit(primitive.bind)(x).tolist() == [0, 0.5, 1, 1.5]
    assert jax.grad(primitive.bind)(1.0) == 10.0
    assert jax.vmap(primitive.bind)(x).tolist() == [100, 100.5, 101, 101.5]
    assert jax.vmap(halved().bind)(x).tolist() == [0, 0.5, 1, 1.5]
    with pytest.raises(NotImplementedError):
        jax.grad(halved().bind)(1.0)
    assert jax.jvp(halved(jvp=lambda x, t: (x[0], t[0] * 7)).bind, (1.0,), (1.0,))[1] == 7.0


def test_a_primitive_of_several_results_that_lowers_itself():
    told = []

    def lower(context, x):
        told.append(context.primitive is None or str(context.primitive))
        return [x, x]

    pair = new_primitive(
        "pair", lambda x: [x, x], lambda x: [x, x], lowering=lower, several=True, devices=True
    )
    assert pair in internals._asking_for_devices
    internals._asking_for_devices.discard(pair)
    assert [one.item() for one in jax.jit(pair.bind)(2.0)] == [2.0, 2.0] and told
    assert pair.bind(2.0) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (jaxpr_classes, "Primitive"),
        *((primitive_rules, n) for n in ("register_lowering", "lower_fun", "defvectorized")),
        *((primitive_rules, n) for n in ("deflinear2", "jvp_rules", "batching_rules")),
    ],
)
def test_a_primitive_whose_rules_have_no_place_raises_when_it_is_bound(hidden, module, name):
    hidden(module, name)
    rules = {"transpose": print, "jvp": print}
    primitive = halved(**rules, **({"batch": print} if name == "batching_rules" else {}))
    with pytest.raises(PrivateNameError, match=f"has no {name}"):
        primitive.bind(1.0)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_name_is_there(row):
    with contextlib.nullcontext() if is_known(row) else pytest.raises(PrivateNameError):
        assert row.resolve() is not None
    assert str(row.error()).startswith(f"jax {jax.__version__} has no {row.path}, which ")


def is_known(row):
    """Whether the table says that the installed JAX has the name."""
    return row.versions == internals.NAMES.versions or is_tried(jax.__version__, row.versions)


@pytest.fixture
def table():
    return PrivateNames("numpy", versions="1.26 to 2.4")


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


def test_a_missing_name_in_a_union_of_classes_raises_where_it_is_asked(table):
    gone = table.bind("numpy._gone", **WORDS)
    for union in (gone | int, int | gone, gone | None):
        with pytest.raises(PrivateNameError):
            isinstance("1", union)


def test_what_is_made_of_a_missing_name_is_missing(table):
    gone = table.bind("numpy._gone", **WORDS)
    with pytest.raises(PrivateNameError, match=r"has no numpy\._gone, which"):
        or_absent(lambda: gone(1)).bind()
    assert or_absent(lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        or_absent(lambda: 1 / 0)


def test_a_missing_name_may_have_a_substitute(table):
    assert table.bind("numpy._gone", otherwise=7, **WORDS) == 7
    assert table.bind("numpy._gone_as_well", make=lambda: 8, **WORDS) == 8
    assert table.bind("numpy.ndarray", make=lambda: 1 / 0, **WORDS) is np.ndarray
    assert [row.substitute for row in table] == [True] * 3
    with pytest.raises(PrivateNameError):
        table.bind("numpy._gone_for_good", make=lambda: 1 / 0, **WORDS)()
    row = table.state("numpy._gone_too", versions="3.0", **WORDS)
    assert row.resolve(None) is None and row.of(object(), 3) == 3
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
    with pytest.raises(ValueError, match=r"numpy\._one is declared already"):
        table.state("numpy._one", **WORDS)
    with pytest.raises(ValueError, match=r"torch\._one is no name of numpy"):
        table.state("torch._one", **WORDS)


def test_a_name_is_wrapped_in_its_place(table, monkeypatch):
    monkeypatch.setattr(np, "_of_this_test", lambda: 1, raising=False)
    row = table.state("numpy._of_this_test", **WORDS)
    row.wrap(lambda before: lambda: before() + 1)
    assert np._of_this_test() == 2
