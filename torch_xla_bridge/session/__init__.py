"""The session of a torch_xla script: mode, chips, memory, replicas, closures."""

if __name__ != "isoshard.torch_xla_bridge.session":
    raise ImportError(f"import isoshard.torch_xla_bridge.session, not {__name__}")
