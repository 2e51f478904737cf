"""What is sent, and how much memory a search takes: the compiled programs."""

import re

import jax

import isoshard as iso
from isoshard.domain.points import knn

from .clouds import cloud, lay_out

SENDS = re.compile(r"= (.*) (collective-permute|all-gather|all-to-all|all-reduce)\(")


def compiled(mesh, axes, *, gradient=False):
    points, queries = (
        lay_out(cloud(8192, n), mesh, axis) for n, axis in zip((0, 1), axes, strict=True)
    )

    def search(p, q):
        return knn(p, q, 8, mesh=mesh, axes=axes, tile=(128, 512)).distances

    def slopes(p, q):
        return jax.grad(lambda p, q: search(p, q).sum(), argnums=(0, 1))(p, q)

    return jax.jit(slopes if gradient else search).lower(points, queries).compile()


def test_the_ring_sends_blocks_of_points_and_makes_no_matrix():
    """In the gradient too."""
    program = compiled(iso.make_mesh((8,), ("x",)), ("x", "x"), gradient=True)
    sent = set(SENDS.findall(program.as_text()))
    assert {name for _, name in sent} == {"collective-permute"}
    assert all(what.startswith("f32[1024,3]") for what, _ in sent)
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < 1024 * 1024 * 4 / 2  # one block by one block would be 4 MiB


def test_points_alone_send_what_is_found():
    text = compiled(iso.make_mesh((8,), ("x",)), ("x", None)).as_text()
    found = {name for _, name in SENDS.findall(text)}
    assert found == {"all-to-all", "all-gather"}
    assert "f32[8192,3]" not in "".join(what for what, _ in SENDS.findall(text))  # no points
