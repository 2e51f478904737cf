"""The benchmark of operators that read neighbours, on a small field."""

from __future__ import annotations

import functools

import numpy as np

import isoshard as iso
from benchmarks import domain_halo


def test_the_contestants_find_the_same():
    name = "conv 3x3, stride 2"
    mesh = iso.make_mesh((4,), ("x",))
    plain, ours = domain_halo.operators(mesh)[name]
    rng = np.random.default_rng(0)
    field = rng.normal(size=(1, 2, 16, 4)).astype(np.float32)
    w = iso.shard(rng.normal(size=(2, 2, 3, 3)).astype(np.float32), mesh, None)
    even = iso.shard(field, mesh, domain_halo.SPEC)
    split = domain_halo.uneven(field, (5, 2, 6, 3), mesh)
    want = domain_halo.compiled(plain, even, w, False)()
    for x, method in ((even, "auto"), (even, "windows"), (split, "auto")):
        chosen = functools.partial(ours, method=method)
        found = domain_halo.compiled(chosen, x, w, False)()
        found = iso.full(found) if isinstance(found, iso.UnevenArray) else found
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    forward = functools.partial(ours, method="auto")
    gradients = domain_halo.compiled(forward, split, w, True)()
    wanted = domain_halo.compiled(plain, even, w, True)()
    for have, want in zip(gradients, wanted, strict=True):
        have = iso.full(have) if isinstance(have, iso.UnevenArray) else have
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
