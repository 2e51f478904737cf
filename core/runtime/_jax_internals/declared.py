"""The table of JAX's private names; the other modules of this folder fill it."""

from isoshard.core.runtime.private_names import PrivateNames

NAMES = PrivateNames("jax", known="0.9 to 0.12")
"""What every row without versions of its own is known to be in."""

NAMES.warn_if_untested()
