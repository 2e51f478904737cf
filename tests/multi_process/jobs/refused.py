"""Starts that cannot work; TEST_KIND says which. The error ends the rank."""

import os

import isoshard as iso


def start():
    kind = os.environ["TEST_KIND"]
    timeout = 60.0
    if kind == "late":
        import jax.numpy as jnp

        jnp.zeros(3)
    if kind.startswith("alone"):
        timeout = 3.0
    if kind == "half-environment":
        del os.environ["MASTER_PORT"]
    iso.distributed.init_distributed(timeout=timeout)


def check_not_reached(world):
    raise AssertionError("the start should have been refused")
