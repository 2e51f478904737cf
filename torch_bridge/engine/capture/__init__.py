"""Whole-step capture: run a step once, name its inputs and outputs, run its program again.

`step` and `recording` run it, `assemble` and `places` name what comes in and goes out, `replay`
runs the compiled program.
"""

if __name__ != "isoshard.torch_bridge.engine.capture":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.capture, not {__name__}: pip install -e . first"
    )
