"""Whole-step capture: run a step once, name its inputs and outputs, replay its program.

`step` and `step_recording` run it, `assemble` and `bindings` name what comes in and goes out,
`replay` runs the compiled program.
"""

if __name__ != "isoshard.torch_bridge.engine.capture":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.capture, not {__name__}: pip install -e . first"
    )
