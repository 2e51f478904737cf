"""What a script of torch_xla asks of its session: mode, chips, memory, replicas, closures."""

if __name__ != "isoshard.torch_xla_bridge.session":
    raise ImportError(f"import isoshard.torch_xla_bridge.session, not {__name__}")
