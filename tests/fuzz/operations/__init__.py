"""What a program may say: one function per kind of line, one file per family.

Each function takes a `Builder`, looks for tensors it can work on, and writes one line; it raises
`Unfit` where there are none.
"""

from __future__ import annotations

from . import elementwise, gradients, index, linear, modules, reduce, shape, views, write

FAMILIES = (
    (views.OPERATIONS, 5),
    (write.OPERATIONS, 5),
    (elementwise.OPERATIONS, 3),
    (index.OPERATIONS, 2),
    (reduce.OPERATIONS, 2),
    (shape.OPERATIONS, 3),
    (linear.OPERATIONS, 1),
    (modules.OPERATIONS, 1),
)
"""Families of operations, and how often each is chosen."""

CHOICES = tuple(family for family, weight in FAMILIES for _ in range(weight))

finish = gradients.finish
