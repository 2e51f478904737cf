"""The table of JAX's private names; the other modules of this folder fill it."""

from isoshard.core.runtime.private_names import TRIED, PrivateNames

NAMES = PrivateNames("jax", versions=TRIED["jax"])
"""What every row without versions of its own is known to be in."""

NAMES.warn_if_untested()
