"""Operations of whole algorithms: attention, and products of groups."""

if __name__ != "isoshard.torch_bridge.kernels":
    raise ImportError(f"import isoshard.torch_bridge.kernels, not {__name__}")
