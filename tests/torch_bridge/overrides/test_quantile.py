"""`quantile` and `nanquantile` against the CPU's."""

from __future__ import annotations

import pytest
import torch

import isoshard.torch_bridge as xs

WAYS = ("linear", "lower", "higher", "midpoint", "nearest")
QS = (0.0, 0.3, 1.0, torch.tensor(0.75), torch.tensor([0.1, 0.5, 0.9]))


def values() -> torch.Tensor:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    x[1, 2, 3] = torch.nan
    return x


def both(name, q, **options):
    results = []
    for device in ("cpu", "jax"):
        x = values().to(device).requires_grad_()
        asked = q.to(device) if isinstance(q, torch.Tensor) else q
        got = getattr(torch, name)(x, asked, **options)
        (grad,) = torch.autograd.grad(got.nansum(), x)
        results += [got.detach(), grad]
    return results


def test_values_and_gradients_are_those_of_the_cpu():
    """Each number and axis linearly; of the other ways one of them in turn."""
    asked = list(zip(QS, (None, 0, -1, 0, None), strict=True))
    cases = [("quantile", "linear", q, dim) for q, dim in asked]
    others = [
        *(("quantile", way) for way in WAYS[1:]),
        *(("nanquantile", way) for way in WAYS[::4]),
    ]
    for n, (name, way) in enumerate(others):
        cases += [(name, way, *asked[(n + more) % len(asked)]) for more in (2 * (n % 2),)]
    found = []
    for name, way, q, dim in cases:
        found.append(both(name, q, dim=dim, keepdim=dim == 0, interpolation=way))
    xs.sync()  # one program for all, which compiles faster than many
    for case, (want, slope, got, other) in zip(cases, found, strict=True):
        for one, expected in ((got, want), (other, slope)):
            torch.testing.assert_close(
                one.cpu(), expected, equal_nan=True, msg=lambda why, case=case: f"{case}: {why}"
            )


def test_of_one_number_and_into_a_tensor():
    x = torch.tensor(2.5, device="jax")
    assert torch.quantile(x, 0.3).item() == torch.quantile(x, 0.3, dim=0, keepdim=True).item()
    out = torch.empty(0, device="jax")
    torch.quantile(torch.arange(5.0, device="jax"), 0.25, out=out)
    assert out.tolist() == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.quantile(1.5), "q must be in the range"),
        (lambda x: x.long().quantile(0.5), "either float or double"),
        (lambda x: x.quantile(0.5, interpolation="cubic"), "interpolation must be one of"),
        (lambda x: x[:0].quantile(0.5), "must be non-empty"),
        (lambda x: x.quantile(torch.ones(1, 1, device=x.device)), "scalar or 1D"),
        (lambda x: x.quantile(torch.ones((), dtype=torch.bfloat16, device=x.device)), "same dtype"),
    ],
)
def test_refused_as_on_the_cpu(call, message):
    for device in ("cpu", "jax"):
        with pytest.raises(RuntimeError, match=message):
            call(torch.ones(3, 2, device=device))
