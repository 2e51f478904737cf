"""Operators that a platform has no program for: on the host, or refused by name."""

import jax
import jax.numpy as jnp
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.subprograms import off_cpu

A = torch.tensor([[0.0, 1.0], [-2.0, 3.0]])


@pytest.fixture
def on_tpu(monkeypatch):
    """As where the devices are TPUs."""
    monkeypatch.setattr(off_cpu, "platform", lambda: "tpu")


def _fallbacks():
    return metrics.counters()["fallbacks"]


def test_on_the_cpu_nothing_goes_to_the_host():
    before = _fallbacks()
    x = A.double().to("jax")
    torch.linalg.eig(x)
    torch.fft.rfft(x)
    xs.sync()
    assert _fallbacks() == before


def test_eigenvalues_are_of_the_host_on_a_tpu(on_tpu):
    before = _fallbacks()
    values, vectors = torch.linalg.eig(A.to("jax"))
    assert _fallbacks() == before + 1
    want, same = torch.linalg.eig(A)
    torch.testing.assert_close(values.cpu(), want)
    torch.testing.assert_close(vectors.cpu(), same)
    assert values.device.type == "jax"
    torch.testing.assert_close(torch.linalg.eigvals(A.to("jax")).cpu(), torch.linalg.eigvals(A))


def test_they_have_a_gradient(on_tpu):
    x, y = A.clone().requires_grad_(), A.to("jax").requires_grad_()
    for each in (x, y):
        torch.linalg.eigvals(each).abs().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(y.grad.cpu(), x.grad)


@pytest.mark.parametrize(
    ("run", "dtype", "count"),
    [
        (torch.fft.fft, torch.complex128, 1),
        (torch.fft.rfft, torch.float64, 1),
        (lambda x: torch.fft.irfft(torch.view_as_complex(x)), torch.float64, 1),
        (torch.fft.fft, torch.complex64, 0),
        (torch.fft.rfft, torch.float32, 0),
    ],
)
def test_only_wide_transforms_are_of_the_host(on_tpu, run, dtype, count):
    before = _fallbacks()
    x = torch.arange(8.0).reshape(4, 2).to(dtype)
    torch.testing.assert_close(run(x.to("jax")).cpu(), run(x))
    assert _fallbacks() == before + count


def test_out_is_written(on_tpu):
    out = torch.empty(2, dtype=torch.complex64, device="jax")
    torch.linalg.eigvals(A.to("jax"), out=out)
    torch.testing.assert_close(out.cpu(), torch.linalg.eigvals(A))


def test_a_captured_step_refuses_them_by_name(on_tpu):
    step = xs.compile(lambda x: torch.linalg.eigvals(x))
    with pytest.raises(
        CaptureError, match=r"no aten::\w*eig\w* of torch.float32 for tpu: the host .*\.cpu"
    ):
        step(A.to("jax"))
    wide = xs.compile(lambda x: torch.fft.rfft(x))
    with pytest.raises(CaptureError, match=r"_fft_r2c of torch.float64 .* narrower dtype"):
        wide(A.double().to("jax"))


def test_a_traced_function_refuses_them_by_name(on_tpu):
    function = iso.jax_function(torch.linalg.eigvals)
    with pytest.raises(NotImplementedError, match=r"eig.* cannot inside a traced function"):
        jax.jit(function)(jnp.eye(2))
