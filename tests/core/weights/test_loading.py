"""Loading: every byte where it belongs, only the bytes that are needed, in little memory."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from isoshard.core.errors import CopyError, ShardingError, UnevenError
from isoshard.core.plan import Plan
from isoshard.core.weights import (
    Concat,
    Kernel,
    Rule,
    SplitAxis,
    WeightError,
    WeightMap,
    load_safetensors,
    save_safetensors,
)
from isoshard.core.weights.reads import joined, reads_of

P = jax.sharding.PartitionSpec
KINDS = ["bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "uint32", "int32"]
KINDS += ["float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
KINDS += ["float8_e4m3fnuz", "float8_e5m2fnuz"]


def random(shape, dtype="float32"):
    dtype = jnp.dtype(dtype)
    rng = np.random.default_rng(len(shape))
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    bits = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return bits.view(dtype).reshape(shape)


def bits(array):
    array = np.ascontiguousarray(jax.device_get(array))
    return array.shape, array.dtype, array.tobytes()


def same(a, b):
    assert sorted(a) == sorted(b)
    for name in a:
        assert bits(a[name]) == bits(b[name]), name


@pytest.fixture
def file(tmp_path):
    """A file that the format's own library wrote."""
    weights = {kind: random((8, 16), kind) for kind in KINDS}
    weights |= {"scalar": np.array(3, np.float32), "empty": random((0, 8)), "row": random((8,))}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(weights, path)
    return path, weights


@pytest.mark.parametrize("spec", [None, (("x", "y"),), (None, ("y", "x")), ("y", "x")])
def test_every_dtype_and_layout(file, mesh, spec):
    path, weights = file
    plan = {name: spec if x.ndim == 2 and x.size else None for name, x in weights.items()}
    loaded = load_safetensors(path, mesh, plan)
    same(loaded, weights)
    for name, x in loaded.items():
        want = jax.sharding.NamedSharding(mesh, P(*(plan[name] or ())))
        assert x.sharding.is_equivalent_to(want, x.ndim)


@pytest.mark.parametrize(
    ("chunk", "spec"),
    [(1 << 12, (None, "x", "y")), (1 << 13, ("x", None, None)), (1 << 13, (None,) * 2)],
)
def test_small_chunks(tmp_path, mesh, chunk, spec):
    weights = {"w": random((6, 40, 64))}
    save_safetensors(tmp_path / "w.safetensors", weights)
    loaded = load_safetensors(tmp_path / "w.safetensors", mesh, spec, chunk=chunk, threads=2)
    same(loaded, weights)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reads_fill_every_wish(tmp_path_factory, data):
    """Any rectangles of any array, also ones that overlap, in chunks of any size."""
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=4)))
    source = random(shape, "uint16")
    wishes = []
    for _ in range(data.draw(st.integers(1, 4))):
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        order = data.draw(st.permutations(range(len(sizes))))
        memory = np.zeros([sizes[i] for i in order], np.uint16).transpose(np.argsort(order))
        wishes.append((tuple(low), memory))
    path = tmp_path_factory.mktemp("reads") / "source"
    path.write_bytes(b"12345" + source.tobytes())
    chunk = data.draw(st.integers(2, 200))
    scratch = np.empty(1 << 12, np.uint8)
    with path.open("rb") as file:
        for read in joined(reads_of(5, shape, source.dtype, wishes, chunk), chunk):
            assert read.buffer <= max(chunk, 2)
            read.run(file.fileno(), scratch)
    for start, memory in wishes:
        ends = zip(start, memory.shape, strict=True)
        np.testing.assert_array_equal(memory, source[tuple(slice(a, a + n) for a, n in ends)])


@pytest.mark.parametrize("most", [7])
def test_a_system_that_reads_less_at_once(tmp_path, mesh, monkeypatch, most):
    from isoshard.core.weights import reads

    preadv = reads.os.preadv

    def less(file, buffers, offset):
        return preadv(file, [buffers[0][:most]], offset)

    weights = {"w": random((8, 16)), "v": random((16, 4), "bfloat16")}
    save_safetensors(tmp_path, weights)
    monkeypatch.setattr(reads.os, "preadv", less)
    same(load_safetensors(tmp_path, mesh, ("y",)), weights)


def test_rows_of_all_devices_are_read_at_once(tmp_path, mesh, counted):
    save_safetensors(tmp_path, {"w": random((64, 1024))})
    load_safetensors(tmp_path, mesh, (("x", "y"),))
    assert counted("file_reads") == 1 and counted("copies") == 0


def test_only_what_is_needed_is_read(tmp_path, counted):
    """Columns of one of many processes: its own bytes and not the row between."""
    shape = (64, 16384)
    memory = np.empty((64, 2048), np.float32)
    reads = list(reads_of(0, shape, np.dtype("float32"), [((0, 2048), memory)], 1 << 20))
    assert sum(read.length * read.count for read in reads) == memory.nbytes
    path = tmp_path / "source"
    path.write_bytes(random(shape).tobytes())
    with path.open("rb") as file:
        scratch = np.empty(1 << 20, np.uint8)
        assert sum(read.run(file.fileno(), scratch) for read in reads) == memory.nbytes
    assert memory.tobytes() == random(shape)[:, 2048:4096].tobytes()


@pytest.mark.parametrize("spec", [(None, None), ("x", "y")])
def test_bytes_read_are_those_of_the_weights(tmp_path, mesh, counted, spec):
    weights = {"w": random((64, 4096))}
    save_safetensors(tmp_path / "w.safetensors", weights)
    load_safetensors(tmp_path / "w.safetensors", mesh, spec)
    assert counted("file_bytes_read") == weights["w"].nbytes


def test_floats_become_another_dtype(tmp_path, mesh):
    weights = {"w": random((8, 8), "int16").astype(np.float32), "ids": random((8,), "int32")}
    save_safetensors(tmp_path / "w.safetensors", weights)
    loaded = load_safetensors(tmp_path / "w.safetensors", mesh, None, dtype=jnp.bfloat16)
    assert loaded["ids"].dtype == np.int32
    same({"w": loaded["w"]}, {"w": weights["w"].astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"int32.* is no float dtype"):
        load_safetensors(tmp_path / "w.safetensors", mesh, None, dtype=jnp.int32)


def test_wide_types(tmp_path, mesh):
    file = tmp_path / "w.safetensors"
    save_safetensors(file, {"ids": np.array([1, -5] * 8)})
    ids = load_safetensors(file, mesh, ("y",))["ids"]
    assert ids.dtype == np.int32 and ids.tolist() == [1, -5] * 8
    save_safetensors(tmp_path / "v.safetensors", {"ids": np.array([1, 1 << 40] * 8)})
    with pytest.raises(CopyError, match=r"ids: values 1\.\.1099511627776 do not fit int32"):
        load_safetensors(tmp_path / "v.safetensors", mesh, ("y",))
    save_safetensors(tmp_path / "d.safetensors", {"w": np.ones(3)})
    with pytest.raises(WeightError, match="w: float64 would lose precision"):
        load_safetensors(tmp_path / "d.safetensors", mesh, None)
    w = load_safetensors(tmp_path / "d.safetensors", mesh, None, dtype=np.float32)["w"]
    assert w.dtype == np.float32


def test_wide_types_with_x64(tmp_path, mesh, x64):
    weights = {"w": np.arange(8.0), "ids": np.array([1 << 40] * 8)}
    save_safetensors(tmp_path / "w.safetensors", weights)
    same(load_safetensors(tmp_path / "w.safetensors", mesh, ("y",)), weights)


RULES = WeightMap(
    [
        Rule("tok.weight", "embed.embedding"),
        Rule("tok.weight", "head.kernel", Kernel(), tie=True),
        Rule(
            ["h.{i}.q.weight", "h.{i}.k.weight", "h.{i}.v.weight"],
            "layers.{i}.qkv.kernel",
            Kernel(),
            Concat(1),
        ),
        Rule("h.{layer}.fc.weight", "stack.kernel", Kernel(), stack="layer"),
        Rule("h.{i}.o.weight", "layers.{i}.o.kernel", Kernel(), SplitAxis(0, (4, -1))),
    ]
)


@pytest.mark.parametrize("spec", [("y", "x"), (None, None, "y"), None])
def test_rules_on_the_way_are_rules_afterwards(tmp_path, mesh, spec):
    source = {"tok.weight": random((16, 8))}
    for i in range(4):
        source |= {f"h.{i}.{name}.weight": random((8, 8), "float32") for name in "qkvo"}
        source |= {f"h.{i}.fc.weight": random((16, 8)), f"h.{i}.o.weight": random((8, 16))}
    expected = RULES.apply(source)
    save_safetensors(tmp_path / "w.safetensors", source)
    plan = {name: spec and spec[: x.ndim] for name, x in expected.items()}
    same(load_safetensors(tmp_path / "w.safetensors", mesh, plan, weights=RULES), expected)


def test_like_gives_structure_and_dtype(tmp_path, mesh):
    save_safetensors(tmp_path / "w.safetensors", {"up.weight": np.ones((4, 8), np.float32)})
    like = {"up": {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}}
    rules = WeightMap([Rule("{p*}.weight", "{p*}.kernel", Kernel())])
    loaded = load_safetensors(tmp_path / "w.safetensors", mesh, None, weights=rules, like=like)
    assert loaded["up"]["kernel"].dtype == jnp.bfloat16


def test_what_does_not_fit_is_listed(tmp_path, mesh):
    weights = {"a": random((4, 8)), "b": random((3,)), "c": random((2,), "int32")}
    save_safetensors(tmp_path / "w.safetensors", weights)
    like = {"a": (8, 4), "c": (2,), "d": (1,)}
    like = {name: np.zeros(shape, np.float32) for name, shape in like.items()}
    with pytest.raises(WeightError) as caught:
        load_safetensors(tmp_path / "w.safetensors", mesh, None, like=like)
    text = str(caught.value)
    for line in (
        "(4 errors)",
        "a: shape (4, 8), but (8, 4) in like",
        "b (3,): made of b (3,), which is not in like",
        "d (1,): no rule makes it",
        "c: is int32 in the file, and float32 in like",
    ):
        assert line in text


def test_specs_that_do_not_fit_are_listed(tmp_path, mesh):
    save_safetensors(tmp_path / "w.safetensors", {"a": random((4, 8)), "b": random((3,))})
    with pytest.raises(UnevenError, match="b: shape"):
        load_safetensors(tmp_path / "w.safetensors", mesh, ("x",))
    with pytest.raises(WeightError, match=r"(?s)b: no spec.*c: a spec, and no such weight"):
        load_safetensors(tmp_path / "w.safetensors", mesh, {"a": None, "c": None})
    with pytest.raises(ShardingError, match="no mesh axis is called 'z'"):
        load_safetensors(tmp_path / "w.safetensors", mesh, Plan({"*": ("z",)}))
    for arguments in ({"threads": 0}, {"chunk": 100}):
        with pytest.raises(ValueError, match="must be 1 or more"):
            load_safetensors(tmp_path, mesh, None, **arguments)
    loaded = load_safetensors(tmp_path / "w.safetensors", mesh, Plan({"a": (None, "y")}))
    assert loaded["a"].sharding.spec == P(None, "y")


def test_progress(tmp_path, mesh, capsys):
    save_safetensors(tmp_path / "w.safetensors", {"w": random((64, 1024))})
    told = []
    load_safetensors(
        tmp_path / "w.safetensors",
        mesh,
        (None, "y"),
        chunk=1 << 16,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [total for _, total in told] == [1 << 18] * len(told)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == 1 << 18
    load_safetensors(tmp_path / "w.safetensors", mesh, None, progress=True)
    assert "w.safetensors" in capsys.readouterr().out


def test_an_error_in_a_thread_ends_the_load(tmp_path, mesh):
    save_safetensors(tmp_path / "w.safetensors", {"w": random((64, 1024))})

    def fails(done, total):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        load_safetensors(tmp_path / "w.safetensors", mesh, None, progress=fails)


def test_memory_is_that_of_shards_and_chunks(tmp_path, mesh):
    spec = (None, ("x", "y"))
    weights = {f"w.{i}": random((512, 1024)) for i in range(8)}
    save_safetensors(tmp_path, weights)
    load_safetensors(tmp_path, mesh, spec)  # what is imported and compiled once
    size, threads, chunk = sum(w.nbytes for w in weights.values()), 2, 1 << 19
    del weights
    tracemalloc.start()
    loaded = load_safetensors(tmp_path, mesh, spec, threads=threads, chunk=chunk)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(loaded) == 8
    assert size <= peak <= size + 1.3 * threads * chunk
