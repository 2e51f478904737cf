"""The cases of every module here, in the order of their libraries."""

from tests.ecosystem import (  # noqa: F401
    jax_libraries,
    model_libraries,
    optimizer_libraries,
    tensor_libraries,
    training_libraries,
    vision_libraries,
)
from tests.ecosystem.case import ENTERED

CASES = sorted(ENTERED, key=lambda case: case.library.lower())
