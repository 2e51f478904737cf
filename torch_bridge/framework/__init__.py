"""The verbs of core (`shard`, `to_jax`, ..) on tensors, modules and optimizers."""

if __name__ != "isoshard.torch_bridge.framework":
    raise ImportError(
        f"import isoshard.torch_bridge.framework, not {__name__}: pip install -e . first"
    )
