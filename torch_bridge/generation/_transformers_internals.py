"""What is used of transformers that has no public name.

As `isoshard.core.runtime.private_names` describes it.

>>> PAD_TOKEN.attribute
'_pad_token_tensor'
"""

from __future__ import annotations

from isoshard.core.runtime.private_names import PrivateNames

NAMES = PrivateNames("transformers", versions="5.23")

CAN_COMPILE = NAMES.state(
    "transformers.modeling_utils.PreTrainedModel._can_compile_fullgraph",
    why="says that a model runs over a static cache",
    without="`generate` takes a dynamic cache, and compiles a program for each token",
)

PAD_TOKEN = NAMES.state(
    "transformers.generation.configuration_utils.GenerationConfig._pad_token_tensor",
    why="is the token of rows that have ended, as `generate` prepared it",
    without="`generate` on the device raises",
)
