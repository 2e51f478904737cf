"""What `torch.amp.GradScaler` requires of a device: unscale gradients, look for infinities, adapt.

Nothing here reads a value on the host, so a scaled training step is one program.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .argument_forms import wide
from .registry import lower


@lower(
    "aten::_amp_foreach_non_finite_check_and_unscale_",
    writes=("self", "found_inf"),
    meta=lambda *_: (),
)
def _unscale(
    grads: Sequence[jax.Array], found_inf: jax.Array, inv_scale: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The gradients times `inv_scale`; `found_inf` becomes 1 if one of them is not finite."""
    finite = [jnp.all(jnp.isfinite(grad)) for grad in grads]
    bad = jnp.zeros((), bool) if not finite else ~jnp.all(jnp.stack(finite))
    scaled = [(wide(grad) * inv_scale).astype(grad.dtype) for grad in grads]
    return scaled, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@lower("aten::_amp_update_scale_", writes=("self", "growth_tracker"))
def _update_scale(
    scale: jax.Array,
    growth_tracker: jax.Array,
    found_inf: jax.Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[jax.Array, jax.Array]:
    """Back off after an infinity, grow after `growth_interval` good steps; and their count."""
    bad = found_inf != 0
    streak = growth_tracker + 1
    due = streak == growth_interval
    grown = scale * scale_growth_factor
    grown = jnp.where(due & jnp.isfinite(grown), grown, scale)
    return (
        jnp.where(bad, scale * scale_backoff_factor, grown),
        jnp.where(bad | due, jnp.zeros_like(streak), streak),
    )
