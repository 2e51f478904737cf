"""The one table of sizes: what each scale trains.

`gpu` is the models as they are published. `cpu` has their layers, heads and stages at reduced
width, image side and length, so that a step takes some hundred milliseconds on two cores with eight
virtual devices. `quick` is for tests of the benchmarks themselves.

>>> problem("gpt2", "cpu").described()["layers"]
12
"""

from __future__ import annotations

from benchmarks.models import gpt2, mlp, resnet, vit
from benchmarks.models.problem import Problem

SIZES = {
    "mlp": {
        "gpu": mlp.Size(width=4096, hidden=16384, batch=1024),
        "cpu": mlp.Size(),
        "quick": mlp.Size(width=32, hidden=64, batch=16),
    },
    "gpt2": {
        "gpu": gpt2.Size(),
        "cpu": gpt2.Size(width=192, vocabulary=512, length=64),
        "quick": gpt2.Size(layers=2, width=48, vocabulary=64, length=8),
    },
    "resnet50": {
        "gpu": resnet.Size(),
        "cpu": resnet.Size(width=16, image=64, classes=16, batch=16),
        "quick": resnet.Size(width=4, image=32, classes=8, batch=16),
    },
    "vit": {
        "gpu": vit.Size(),
        "cpu": vit.Size(width=192, image=64, patch=8, classes=16, batch=8),
        "quick": vit.Size(layers=2, width=48, image=16, patch=4, classes=8, batch=4),
    },
}
SCALES = ("gpu", "cpu", "quick")

_MAKERS = {
    "mlp": mlp.problem,
    "gpt2": gpt2.problem,
    "resnet50": resnet.problem,
    "vit": vit.problem,
}


def problem(name: str, scale: str) -> Problem:
    """The problem of this name at one of `SCALES`."""
    return _MAKERS[name](SIZES[name][scale])
