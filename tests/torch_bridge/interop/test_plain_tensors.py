"""A JAX function on plain CPU tensors: shared memory, gradients, devices, errors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import CopyError
from isoshard.core.transfer.exchange import aligned_empty


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    """In memory that JAX can share."""
    host = aligned_empty(shape, np.float32)
    host[:] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).numpy()
    return torch.from_numpy(host)


def test_values_and_gradients_with_shared_memory(counted):
    traced = []

    def jax_f(tree, *, power, flag=None):
        traced.append(power)
        h = jnp.tanh(tree["x"] @ tree["w"]) ** power
        return {"h": h, "pair": (h.sum(0), jnp.argmax(h, 1)), "none": None}

    f = iso.torch_function(jax_f)
    x, w = data(3, 4).requires_grad_(), data(4, 5, seed=1).requires_grad_()
    for _ in range(3):
        out = f({"x": x, "w": w}, power=2, flag="s")
        assert out["none"] is None and not out["pair"][1].requires_grad
        (out["h"].square().sum() + out["pair"][0].prod()).backward()
    assert traced == [2] and counted("compilations") == 2 and counted("copies") == 0
    a, b = (t.detach().clone().requires_grad_() for t in (x, w))
    for _ in range(3):
        h = torch.tanh(a @ b) ** 2
        (h.square().sum() + h.sum(0).prod()).backward()
    torch.testing.assert_close(out["h"], h)
    torch.testing.assert_close(out["pair"][1].long(), h.argmax(1))
    torch.testing.assert_close([x.grad, w.grad], [a.grad, b.grad], rtol=5e-5, atol=1e-6)
    assert (out["h"].device, x.grad.device) == (torch.device("cpu"),) * 2


def test_what_cannot_be_shared_is_copied_and_counted_or_refused(counted):
    seen = []
    probe = lambda x: seen.append(1) or x * 2  # noqa: E731
    whole, f = data(4, 16), iso.torch_function(probe)
    f(whole)
    assert counted("copies") == 0
    torch.testing.assert_close(f(whole.t()), whole.t() * 2)
    torch.testing.assert_close(f(whole[0, 1:]), whole[0, 1:] * 2)
    assert (counted("copies"), counted("copied_bytes")) == (2, 4 * 64 + 4 * 15)
    strict = iso.torch_function(probe, copy=False)
    torch.testing.assert_close(strict(whole), whole * 2)
    with pytest.raises(CopyError, match=r"argument 0 of <lambda>: cannot share .*contiguous"):
        strict(whole.t())
    iso.torch_function(probe, copy=True)(whole)
    assert counted("copies") == 3


def test_results_are_memory_of_their_own(counted):
    kept = jnp.ones(3)
    f = iso.torch_function(lambda x: (x, x, kept, kept + 0 * x, x.sum() * 0))
    x = data(3)
    before = x.clone()
    for _ in range(2):
        results = f(x)
        torch.testing.assert_close(results[0], before)
        torch.testing.assert_close(results[2], torch.ones(3))
        for one in results:
            one.add_(7)
        torch.testing.assert_close(results[1], before + 7)
        torch.testing.assert_close(x, before)
    x.fill_(5)
    torch.testing.assert_close(results[0], before + 7)


def test_writes_that_spoil_a_gradient_are_noticed():
    f = iso.torch_function(lambda x: x * x)
    x = data(3).requires_grad_()
    h = x * 1
    y = f(h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = f(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_gradients_of_gradients_in_float64(x64):
    f = iso.torch_function(lambda x, k: jnp.sin(x) * jax.random.uniform(k, x.shape, x.dtype))
    key = jax.random.key(0)
    torch.autograd.gradcheck(lambda x: f(x, key), data(3).double().requires_grad_())
    torch.autograd.gradgradcheck(lambda x: f(x, key), data(3).double().requires_grad_())


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_complex_gradients_are_those_of_torch(device):
    z = torch.complex(data(4), data(4, seed=1))

    def run(function, device):
        a = z.clone().to(device).requires_grad_()
        out = function(a)
        (out.real.square().sum() + out.imag.sum()).backward()
        return a.grad.cpu()

    got = run(iso.torch_function(lambda a: a * jnp.exp(a.conj())), device)
    torch.testing.assert_close(got, run(lambda a: a * a.conj().exp(), "cpu"))


def test_dtypes():
    """Wide types need 64 bits of JAX."""
    whole = torch.bool, torch.uint8, torch.int64
    for dtype in (*whole, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.tensor([0, 1, 2]).to(dtype)
        got = iso.torch_function(lambda x: x)(x)
        assert got.dtype == (torch.int32 if dtype == torch.int64 else dtype)
        assert torch.equal(got.to(dtype), x)
    with pytest.raises(CopyError, match="float64 would lose precision"):
        iso.torch_function(jnp.sin)(torch.ones(2, dtype=torch.float64))
    with pytest.raises(CopyError, match="int32"):
        iso.torch_function(lambda x: x)(torch.tensor([2**40]))


def test_pallas_custom_vjp_and_shard_map(mesh, counted):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 3

    @jax.custom_vjp
    def tripled(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (g * 100,))
    spec = P(("x", "y"))
    mapped = jax.shard_map(
        lambda x: x + jax.lax.psum(x, ("x", "y")), mesh=mesh, in_specs=spec, out_specs=spec
    )

    def spread(x):  # along Explicit axes, shard_map takes what lies as its in_specs say
        return mapped(iso.shard(x, mesh, spec))

    for function, value, gradient in ((tripled, 3.0, 100.0), (spread, 9.0, 9.0)):
        for device in ("cpu", "jax"):
            x = torch.ones(8, device=device).requires_grad_()
            y = iso.torch_function(function)(x)
            y.sum().backward()
            assert y.tolist() == [value] * 8 and x.grad.tolist() == [gradient] * 8
    assert counted("gathers") == 2  # the result and the gradient of the one on CPU tensors


def test_devices_and_constants():
    f = iso.torch_function(lambda t, n=0: t * n, name="times")
    with pytest.raises(TypeError, match=r"times got tensors on several devices: cpu \(.*, jax:0"):
        f(torch.ones(2), torch.ones(2, device="jax"))
    with pytest.raises(TypeError, match=r"times got tensors without values: meta.*eval_shape"):
        f(torch.ones(2, device="meta"))
    with pytest.raises(TypeError, match="times takes tensors, arrays and hashable constants"):
        f(torch.ones(2), {1, 2})
    assert f(torch.ones(2), np.float32(3.0)).tolist() == [3, 3]
    assert f(torch.ones(2), jnp.arange(2.0)).tolist() == [0, 1]
    assert f(torch.ones(2), 2).tolist() == [2, 2]
    with pytest.raises(TypeError, match="incompatible shapes"):
        f(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError, match="wide gives a result that torch cannot hold"):
        iso.torch_function(lambda x: x.astype("int4"), name="wide")(torch.ones(2))


def test_a_gpu_tensor_crosses_by_dlpack_or_is_named(monkeypatch):
    from isoshard.torch_bridge.interop import plain_tensors as plain

    class OnGpu:
        device = torch.device("cuda:1")
        detach = contiguous = lambda self: self

    array = jnp.ones(3)
    monkeypatch.setattr(plain.jnp, "from_dlpack", lambda tensor: array)
    assert plain.to_array(OnGpu(), None, "x") is array
    copied = plain.to_array(OnGpu(), True, "x")
    assert copied.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()

    def fails(_):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(plain.jnp, "from_dlpack", fails)
    message = r"argument 0 .* cuda:1, which JAX cannot use .*install JAX"
    with pytest.raises(TypeError, match=message):
        plain.to_array(OnGpu(), None, "argument 0 of f")


def test_a_captured_step_refuses_what_it_could_not_replay():
    f = iso.torch_function(jnp.sin)
    model = torch.nn.Linear(2, 2).to("jax")
    step = xs.compile(lambda x: model(x) + f(torch.ones(2)).to("jax"))
    with pytest.raises(xs.CaptureError, match="the result of sin on plain tensors"):
        for _ in range(3):
            step(torch.ones(1, 2, device="jax"))


def test_a_cpu_tensor_is_a_constant_while_jax_traces():
    f = iso.torch_function(functools.partial(jnp.multiply))
    half = torch.full((2,), 0.5)
    got = jax.jit(iso.jax_function(lambda x: f(x, half)))(jnp.arange(2.0))
    assert got.tolist() == [0, 0.5]
