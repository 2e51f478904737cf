"""Drawn meshes, splits and chains of operators, for the tests of both frameworks."""

import numpy as np
from hypothesis import strategies as st

from isoshard import P

MESHES = [((4,), ("x",)), ((8,), ("x",)), ((2, 4), ("x", "y"))]


@st.composite
def cases(draw, links, *, least, most):
    """A mesh, a spec, sizes, the shape, and the names of some links.

    Args:
        draw: hypothesis gives it.
        links: all names.
        least: elements of an axis, at the least.
        most: links of a chain, at most.
    """
    shape, names = draw(st.sampled_from(MESHES))
    entries = [draw(st.sampled_from(names)), None]
    if len(names) > 1 and draw(st.booleans()):
        entries = draw(st.sampled_from([["x", "y"], ["y", "x"], [("x", "y"), None]]))
    if draw(st.booleans()):
        entries.reverse()
    sizes, extents = [], []
    for entry in entries:
        if entry is None:
            sizes.append(None)
            extents.append(draw(st.integers(least, 6)))
            continue
        axes = (entry,) if isinstance(entry, str) else entry
        count = int(np.prod([shape[names.index(axis)] for axis in axes]))
        own = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
        own[draw(st.integers(0, count - 1))] += least
        sizes.append(tuple(own))
        extents.append(sum(own))
    drawn = draw(st.lists(st.sampled_from(sorted(links)), min_size=1, max_size=most))
    return (shape, names), P(*entries), tuple(sizes), tuple(extents), drawn
