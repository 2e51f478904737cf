"""The functions of the extension points of the heart: docs/architecture.md."""

from .core import extensions

PROVIDED = {
    "attend_in_blocks": "isoshard.domain.attention.uneven_attention:attend_in_blocks",
    "block_avg_pool": "isoshard.domain:avg_pool",
    "block_conv": "isoshard.domain:conv",
    "block_conv_transpose": "isoshard.domain:conv_transpose",
    "block_interpolate": "isoshard.domain:interpolate",
    "block_max_pool": "isoshard.domain:max_pool",
    "block_pad": "isoshard.domain:pad",
    "by_halos": "isoshard.domain.windows.space_split:by_halos",
    "call_domain_verb": "isoshard.domain.torch_verbs:call",
    "call_function_handler": "isoshard.domain.torch_handlers.torch_routing:routed",
    "conv_operator": "isoshard.domain.windows.conv:conv_operator",
    "automatic_plan": "isoshard.planner.torch_steps.automatic_layouts:automatic_plan",
    "gather_uneven": "isoshard.core.blocks.packing:gather",
    "gradients_in_blocks": "isoshard.domain.attention.uneven_attention:gradients_in_blocks",
    "shard_step": "isoshard.planner.torch_steps.automatic_layouts:shard_step",
    "marked_modules": "isoshard.planner.flax_steps:marked_modules",
    "max_operator": "isoshard.domain.windows.pool:max_operator",
    "mean_operator": "isoshard.domain.windows.pool:mean_operator",
    "operand_cotangent_by_halos": "isoshard.domain.windows.space_split:operand_cotangent_by_halos",
    "peak_flops": "isoshard.planner.machine.chips:peak_flops",
    "partitioned_attention": "isoshard.domain.attention.partitioned_attention:Attention",
    "reshard_uneven": "isoshard.core.blocks.packing:reshard_uneven",
    "resize_operator": "isoshard.domain.windows.resize:resize_operator",
    "scan_where_split": "isoshard.domain.windows.running_scan:scan_where_split",
    "cotangent_by_halos": "isoshard.domain.windows.space_split:cotangent_by_halos",
    "search_plan": "isoshard.planner.plan_search.searching:plan_for",
    "shard_padded": "isoshard.core.blocks.padded_sharding:shard_padded",
    "split_fft": "isoshard.domain.fourier.fourier_primitive:transform",
    "spread_shardings": "isoshard.planner.propagation.boundary_shardings:propagated_shardings",
    "traced_flax_step": "isoshard.planner.flax_steps:traced_flax_step",
    "traced_torch_step": "isoshard.planner.torch_steps.torch_steps:traced_step",
    "traced_train_step": "isoshard.planner.flax_steps:traced_train_step",
    "transposed_operator": "isoshard.domain.windows.transposed_conv:transposed_operator",
}
"""Name of a point -> "module:function"."""


def install() -> None:
    """Provide every point; no function is imported."""
    for point in extensions.POINTS:
        point.provide(PROVIDED[point.name])
