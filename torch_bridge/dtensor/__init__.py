"""DTensors of many processes and JAX arrays over them: the same shards, the same layout."""

if __name__ != "isoshard.torch_bridge.dtensor":
    raise ImportError(f"import isoshard.torch_bridge.dtensor, not {__name__}")
