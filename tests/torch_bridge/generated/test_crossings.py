"""Values of every dtype cross to JAX and back as they are, and are converted as torch converts.

Values are awkward ones: the largest and smallest, infinities, NaN, -0.0, integers beyond 32 bits.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle

import jax
import numpy as np
import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P

from .known_faults import CROSSINGS, FLOATS_OF_8, UNSIGNED

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *FLOATS_OF_8, *COMPLEX)
WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)


def awkward(dtype):
    """Eight values of a dtype at the ends of what it holds."""
    if dtype is torch.bool:
        values = [True, False] * 4
    elif dtype.is_complex:
        values = [0j, complex(-0.0, 1), 1 + 2j, complex(np.inf, 0), 3e30 - 1j, 1e-30j, -1 + 0j, 2j]
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        least = 0.0 if dtype in FLOATS_OF_8[2:] else -0.0
        ends = [info.max, info.min, info.tiny, least, 1 + info.eps]
        values = [*ends, -1.0, *([np.inf, np.nan] if dtype in FLOATS else [1.5, 3.0])]
    else:
        info = torch.iinfo(dtype)
        values = [info.max, info.min, 0, 1, info.max // 2 + 3, info.min // 2, info.max - 7, 100]
    if dtype in UNSIGNED:
        return torch.from_numpy(np.array(values, str(dtype).removeprefix("torch.")))
    return torch.tensor(values, dtype=torch.float64 if dtype in FLOATS_OF_8 else dtype).to(dtype)


def same(found, want):
    """Whether two tensors hold the same bits; NaNs of any bits are equal."""
    if found.dtype != want.dtype or found.shape != want.shape:
        return False
    if want.dtype.is_floating_point or want.dtype.is_complex:
        wide = torch.complex128 if want.dtype.is_complex else torch.float64
        found, want = found.to(wide), want.to(wide)
        return torch.equal(torch.nan_to_num(found, 7.5), torch.nan_to_num(want, 7.5)) and (
            want.is_complex()
            or torch.equal(found.signbit() & (found == found), want.signbit() & (want == want))
        )
    return np.array_equal(found.numpy(), want.numpy())


MESH = iso.make_mesh((8,), ("a",))
OVER = {
    "device": lambda t: t.to("jax"),
    "to_jax": lambda t: iso.to_torch(iso.to_jax(t)),
    "to_jax on the device": lambda t: iso.to_torch(iso.to_jax(t.to("jax"))),
    "copied to_jax": lambda t: iso.to_torch(iso.to_jax(t, copy=True)),
    "shard": lambda t: iso.shard(t, MESH, P("a")),
    "shard on the device": lambda t: iso.shard(t.to("jax"), MESH, P("a")),
    "torch_function on the device": lambda t: iso.torch_function(lambda a: a)(t.to("jax")),
    "jax_function": lambda t: iso.to_torch(iso.jax_function(lambda a: a.clone())(iso.to_jax(t))),
    "jitted jax_function": lambda t: iso.to_torch(
        jax.jit(iso.jax_function(lambda a: a.clone()))(iso.to_jax(t))
    ),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.to("jax"))),
    "deepcopy": lambda t: copy.deepcopy(t.to("jax")),
    "dlpack": lambda t: iso.to_torch(jax.numpy.from_dlpack(t.to("jax"))),
}


@pytest.mark.parametrize("way", OVER)
def test_values_cross_as_they_are(way):
    wrong = {}
    for dtype in DTYPES:
        value = awkward(dtype)
        try:
            found = OVER[way](value.clone()).cpu()
        except (iso.errors.CopyError, TypeError) as error:
            assert dtype in WIDE and "jax_enable_x64" in str(error)  # refused by name
        except AttributeError as error:
            wrong[dtype] = type(error)
        else:
            if not same(found, value):
                wrong[dtype] = AssertionError
    known = {
        dtype: error
        for error, ways, dtypes in CROSSINGS.values()
        if way in ways
        for dtype in dtypes
    }
    assert wrong == known


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_values_are_converted_as_torch_does():
    given, found, wrong = {}, {}, {}
    for dtype, other in itertools.product(DTYPES, DTYPES):
        value = within(awkward(dtype), other)
        with contextlib.suppress(RuntimeError, NotImplementedError):  # torch's CPU kernels lack it
            given[dtype, other] = value, value.to(other)
            found[dtype, other] = value.to("jax").to(other)
    xs.sync()
    for pair, (value, want) in given.items():
        if not same(got := found[pair].cpu(), want):
            wrong[pair] = value.tolist(), got.tolist(), want.tolist()
    assert not wrong


def within(value, dtype):
    """The values that a dtype holds: C leaves open what others become as integers."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return value
    if not value.dtype.is_floating_point and not value.is_complex():
        return value
    info, wide = torch.iinfo(dtype), (value.real if value.is_complex() else value).double()
    return value[(wide >= info.min) & (wide < float(info.max))]
