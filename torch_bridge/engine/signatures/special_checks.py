"""Special functions, which torch's kernels know for real numbers only.

>>> real_numbers("special_zeta", {"self": torch.ones(2), "other": torch.ones(2) * 1j})
Traceback (most recent call last):
...
NotImplementedError: "special_zeta" not implemented for 'ComplexFloat'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernel_checks import spelled

Arguments = dict[str, Any]

_BESSEL = (
    *("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "spherical_bessel_j0"),
    *("modified_bessel_i0", "modified_bessel_i1", "modified_bessel_k0", "modified_bessel_k1"),
    *("scaled_modified_bessel_k0", "scaled_modified_bessel_k1"),
)
_POLYNOMIALS = (
    *(f"chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *("hermite_polynomial_h", "hermite_polynomial_he"),
    *("laguerre_polynomial_l", "legendre_polynomial_p"),
)
_OTHERS = (
    *("airy_ai", "entr", "erfcx", "i0e", "i1", "i1e", "log_ndtr", "ndtri", "xlog1py", "zeta"),
)
_REAL = frozenset(
    {
        *(f"special_{name}" for name in (*_BESSEL, *_POLYNOMIALS, *_OTHERS)),
        *("igamma", "igammac", "polygamma", "mvlgamma"),
    }
)


def rules_of(name: str) -> tuple[Callable[[str, Arguments], None], ...]:
    """The rules of a special function; other operators have none.

    Args:
        name: the operator's, without namespace.
    """
    return (real_numbers,) if name.removesuffix("_") in _REAL else ()


def real_numbers(name: str, named: Arguments) -> None:
    """Refuse complex numbers, as tensors and as Python's."""
    for value in named.values():
        if type(value) is complex or (isinstance(value, torch.Tensor) and value.is_complex()):
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.complex64
            raise NotImplementedError(f"\"{name}\" not implemented for '{spelled(dtype)}'")


def order_of_gamma(name: str, named: Arguments) -> None:
    """Refuse multivariate gamma functions of bools, and of no order."""
    if named["p"] < 1:
        raise RuntimeError(f"{name}: p has to be greater than or equal to 1, but got {named['p']}")
    if named["self"].dtype == torch.bool:
        raise RuntimeError(f"{name}: The input tensor may not be a boolean tensor; give numbers")
