"""What torch_xla calls experimental."""

if __name__ != "isoshard.torch_xla_bridge.torch_xla.experimental":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla.experimental, not {__name__}")

from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

from .eager import compile, eager_mode, eager_mode_context, is_eager_mode

__all__ = ["compile", "eager_mode", "eager_mode_context", "is_eager_mode"]

__getattr__ = submodules(
    __name__,
    (
        "assume_pure",
        "custom_kernel",
        "distributed_checkpoint",
        "dynamo_mark_sharding",
        "fori_loop",
        "gradient_accumulation",
        "gru",
        "scan",
        "scan_layers",
        "spmd_fully_sharded_data_parallel",
        "xla_quantized_matmul",
    ),
)
