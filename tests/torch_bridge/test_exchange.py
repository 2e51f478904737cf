"""Buffers cross between torch and JAX: shared where possible, refused or said where not."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, make_mesh
from isoshard.core.transfer.exchange import aligned_empty
from isoshard.errors import CopyError

MB = 1 << 20


@pytest.fixture(scope="module")
def line() -> jax.sharding.Mesh:
    return make_mesh((8,), ("x",))


def aligned(*shape: int, dtype: type = np.float32) -> torch.Tensor:
    """A torch tensor whose memory XLA can share."""
    array = aligned_empty(shape, dtype)
    array[...] = np.arange(array.size).reshape(shape) % 101
    return torch.from_numpy(array)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def rows(tensor: torch.Tensor) -> list[int]:
    """Where each eighth of a tensor's rows starts."""
    step = tensor.shape[0] // 8 * tensor.stride(0) * tensor.element_size()
    return [tensor.data_ptr() + number * step for number in range(8)]


# --- 64 MB, no copy ------------------------------------------------------------------------------


def test_64_mb_from_jax_to_torch_shards_share_every_pointer(line, counted):
    a = jax.device_put(np.zeros((4096, 4096), np.float32), jax.NamedSharding(line, P("x")))
    assert a.nbytes == 64 * MB
    want = pointers(a)
    for pieces in (
        iso.local_shards(a, framework="torch"),
        iso.local_shards(iso.to_torch(a, copy=False), framework="torch"),
    ):
        assert [piece.data.data_ptr() for piece in pieces] == want
        assert all(type(piece.data) is torch.Tensor for piece in pieces)
    assert pointers(iso.to_jax(iso.to_torch(a), copy=False)) == want
    assert counted("copies") == counted("copied_bytes") == counted("executions") == 0


def test_64_mb_from_torch_to_jax_rows_share_every_pointer(line, counted):
    t = aligned(4096, 4096)
    for a in (
        iso.to_jax(t, jax.NamedSharding(line, P("x")), copy=False),
        iso.to_jax(iso.shard(t, line, P("x", None), copy=False), copy=False),
    ):
        assert pointers(a) == rows(t)
    assert counted("copies") == counted("copied_bytes") == 0


def test_a_module_shares_every_pointer_with_jax(line, counted):
    model = torch.nn.Linear(64, 64, bias=False)
    model.weight.data = aligned(64, 64)
    where = rows(model.weight.detach())
    iso.shard(model, line, P("x", None), copy=False)
    assert pointers(iso.to_jax(model, copy=False)["weight"]) == where
    assert counted("copies") == 0


def test_copies_have_memory_of_their_own_and_are_counted(line, counted):
    t = aligned(64, 16)
    a = iso.to_jax(t, jax.NamedSharding(line, P("x")), copy=True)
    t.zero_()
    assert np.asarray(a).sum() > 0
    assert counted("copied_bytes") == 64 * 16 * 4
    b = iso.to_torch(a, copy=True)
    assert not set(pointers(iso.to_jax(b))) & set(pointers(a))
    with jax.enable_x64(True):
        wide = jax.numpy.full(2, 2**40 + 1)
    assert iso.to_torch(wide, copy=True).tolist() == [2**40 + 1] * 2


# --- What must copy ------------------------------------------------------------------------------

MUST_COPY = {
    "columns": (lambda: aligned(64, 64), P(None, "x"), r"not contiguous"),
    "unaligned": (lambda: aligned(65 * 16)[1 : 1 + 64 * 16].view(64, 16), P("x"), r"64"),
    "small rows": (lambda: aligned(8, 2), P("x"), r"64"),
    "transposed": (lambda: aligned(64, 64).t(), P("x"), r"not contiguous"),
}


@pytest.mark.parametrize("name", MUST_COPY)
def test_what_must_copy_is_refused_without_permission_and_counted_with_it(name, line, counted):
    make, spec, message = MUST_COPY[name]
    t = make()
    want = t.numpy().copy()
    for share in (
        lambda: iso.to_jax(t, jax.NamedSharding(line, spec), copy=False),
        lambda: iso.shard(t, line, spec, copy=False),
    ):
        with pytest.raises(CopyError, match=rf"copy=False.*{message}"):
            share()
    assert counted("copies") == 0
    np.testing.assert_array_equal(iso.to_jax(t, jax.NamedSharding(line, spec)), want)
    np.testing.assert_array_equal(iso.shard(t, line, spec).cpu(), want)
    assert counted("copies") > 0 and counted("copied_bytes") > 0
    np.testing.assert_array_equal(t.numpy(), want)


def test_another_layout_is_a_copy(line):
    t = iso.shard(aligned(64, 64), line, P("x", None))
    with pytest.raises(CopyError, match=r"must move"):
        iso.shard(t, line, P(None, "x"), copy=False)
    with pytest.raises(CopyError, match=r"must move"):
        iso.to_jax(t, jax.NamedSharding(line, P(None, "x")), copy=False)
    assert iso.sharding_of(iso.shard(t, line, P(None, "x"))).spec == P(None, "x")


def test_a_module_that_must_copy_is_left_as_it_was(line):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 8))
    for layer in model:
        layer.weight.data = aligned(*layer.weight.shape)
    before = {name: id(p) for name, p in model.named_parameters()}
    specs = {"0.weight": P("x"), "1.weight": P(None, "x"), "1.bias": P()}
    with pytest.raises(CopyError, match=r"1\.weight"):
        iso.shard(model, line, specs, copy=False)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model(torch.ones(1, 64)).shape == (1, 8)


# --- Dtypes and shapes ---------------------------------------------------------------------------


def test_int64_keeps_its_torch_dtype_and_becomes_int32_in_jax(line):
    t = torch.arange(64).reshape(8, 8)
    s = iso.shard(t, line, P("x", None))
    assert s.dtype == torch.int64 and torch.equal(s.cpu(), t)
    assert iso.to_jax(s).dtype == iso.to_jax(t).dtype == jnp.int32
    assert iso.to_torch(iso.to_jax(s)).dtype == torch.int32


DTYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.complex64: "complex64",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_crosses_bit_by_bit_without_a_copy(dtype, line, counted):
    raw = aligned_empty((8, 128 * dtype.itemsize), np.uint8)
    raw[...] = np.arange(raw.size).reshape(raw.shape) % (2 if dtype == torch.bool else 100)
    t = torch.from_numpy(raw).view(dtype)
    a = iso.to_jax(t, jax.NamedSharding(line, P("x")), copy=False)
    assert a.dtype == jnp.dtype(DTYPES[dtype]) and pointers(a) == rows(t)
    back = iso.to_torch(a, copy=False)
    assert back.dtype == dtype and pointers(iso.to_jax(back)) == pointers(a)
    assert torch.equal(back.cpu().view(torch.uint8), t.view(torch.uint8))
    assert counted("copies") == 0
    for number, piece in enumerate(iso.local_shards(a, framework="torch")):
        assert piece.data.dtype == dtype
        assert torch.equal(piece.data.view(torch.uint8), t[number : number + 1].view(torch.uint8))


def test_empty_and_zero_dimensional_tensors(line):
    mesh = make_mesh((2, 4), ("x", "y"))
    assert iso.to_jax(torch.zeros(0, 3)).shape == (0, 3)
    assert iso.shard(torch.zeros(8, 0), line, P("x", None)).cpu().shape == (8, 0)
    assert iso.shard(torch.zeros(0, 8), mesh, P(None, "y")).local_shards[0].data.shape == (0, 2)
    scalar = iso.shard(torch.tensor(3.5), mesh, P())
    assert scalar.item() == 3.5 and len(scalar.local_shards) == 8
    assert iso.to_jax(torch.tensor(2.0)).shape == () and iso.to_torch(jnp.float32(4)).item() == 4
    assert iso.to_torch(jnp.zeros((0, 2))).tolist() == []
    assert scalar.local_shards[3].data.shape == () and scalar.sharding_spec == "{replicated}"


def test_requires_grad_is_kept_by_shard_and_has_no_meaning_in_jax(line):
    p = torch.nn.Parameter(torch.ones(8, 4))
    s = iso.shard(p, line, P("x", None))
    assert isinstance(s, torch.nn.Parameter) and s.requires_grad and s.is_leaf
    assert isinstance(iso.to_jax(p), jax.Array) and isinstance(iso.to_jax(s), jax.Array)
    for computed in (p * 2, s * 2):
        with pytest.raises(CopyError, match=r"require grad.*detach"):
            iso.to_jax(computed)
        assert iso.to_jax(computed.detach()).shape == (8, 4)
    assert not iso.to_torch(iso.to_jax(s)).requires_grad


def test_conjugate_and_negative_views():
    t = torch.tensor([1 + 2j, 3 - 1j])
    np.testing.assert_array_equal(iso.to_jax(t.conj()), t.conj().resolve_conj().numpy())
    np.testing.assert_array_equal(iso.to_jax(t.conj().imag), [-2, 1])
    np.testing.assert_array_equal(t.conj().to("jax").cpu().resolve_conj(), t.conj().resolve_conj())


# --- Who sees whose writes -----------------------------------------------------------------------


def test_a_write_to_shared_host_memory_is_seen_by_jax(line):
    """The stated price of sharing."""
    t = aligned(64, 16)
    a = iso.to_jax(t, jax.NamedSharding(line, P("x")), copy=False)
    t.fill_(7)
    assert np.asarray(a).min() == 7


def test_a_write_through_the_device_is_not_seen_by_the_host(line):
    t = aligned(64, 16)
    want = t.clone()
    s = iso.shard(t, line, P("x", None), copy=False)
    s.add_(1)
    xs.sync()
    assert torch.equal(t, want) and torch.equal(s.cpu(), want + 1)


def test_memory_lives_as_long_as_anyone_uses_it(line):
    def make() -> tuple[torch.Tensor, jax.Array]:
        t = aligned(64, 16)
        a = iso.to_jax(t, jax.NamedSharding(line, P("x")), copy=False)
        piece = iso.local_shards(iso.to_torch(a * 2), framework="torch")[3].data
        return piece, a

    piece, a = make()
    gc.collect()
    junk = [np.random.default_rng(0).random(64 * 16) for _ in range(50)]
    want = (np.arange(64 * 16) % 101).reshape(64, 16)
    np.testing.assert_array_equal(a, want)
    np.testing.assert_array_equal(piece, want[24:32] * 2)
    assert len(junk) == 50


def test_to_torch_of_other_things(line):
    tree = {"a": jnp.ones(2), "b": [np.zeros(3, np.float32)]}
    got = iso.to_torch(tree)
    assert isinstance(got["a"], xs.XLAShardedTensor) and got["b"][0].tolist() == [0, 0, 0]
    t = torch.ones(2, device="jax")
    assert iso.to_torch(t) is t
    with pytest.raises(TypeError, match=r"to_torch takes"):
        iso.to_torch("text")


def test_to_torch_on_the_cpu(line, counted):
    a = iso.shard(aligned(64, 16), line, P("x", None))
    got = iso.to_torch({"a": a, "i": np.array([2**40])}, device="cpu")
    assert type(got["a"]) is torch.Tensor and got["a"].device == torch.device("cpu")
    np.testing.assert_array_equal(got["a"], np.asarray(a))
    assert got["i"].tolist() == [2**40] and got["i"].dtype == torch.int64
    one = jnp.arange(6.0)
    copied, shared = iso.to_torch(one, device="cpu"), iso.to_torch(one, device="cpu", copy=False)
    assert shared.data_ptr() == one.unsafe_buffer_pointer() != copied.data_ptr()
    assert iso.to_torch(iso.to_torch(one), device="cpu").tolist() == list(range(6))
    half = jnp.ones(3, "bfloat16")
    assert iso.to_torch(half, device="cpu").dtype == torch.bfloat16
    uneven = iso.shard(np.arange(10.0, dtype=np.float32), line, P("x"), uneven="pad")
    assert iso.to_torch(uneven, device="cpu").tolist() == list(range(10))
    with pytest.raises(iso.errors.CopyError, match=r"is not on one CPU device .*; pass copy=None"):
        iso.to_torch(a, device="cpu", copy=False)
    with pytest.raises(ValueError, match="on 'jax' or on 'cpu', not on 'cuda:0'"):
        iso.to_torch(one, device="cuda:0")

    weight = torch.nn.Parameter(torch.ones(3))
    gradient = jax.grad(lambda w: (w**2).sum())(iso.to_jax(weight.detach()))
    weight.grad = iso.to_torch(gradient, device="cpu")
    torch.optim.SGD([weight], 0.25).step()
    assert weight.tolist() == [0.5] * 3


def test_gradients_and_ties_move_with_a_module(line):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model(torch.ones(1, 8)).sum().backward()
    want = model[0].weight.grad.clone()
    iso.shard(model, line, P())
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight.grad.cpu(), want)
    assert isinstance(model[0].weight, torch.nn.Parameter)


def test_tensors_are_pinned_for_cuda_where_there_is_cuda(monkeypatch):
    torch.ones(1, device="jax")  # from here on the device is torch's accelerator
    numbers = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(numbers.pin_memory(), numbers)
    with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):  # torch's own kernel: there is none
        numbers.pin_memory("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):
        numbers.pin_memory()
