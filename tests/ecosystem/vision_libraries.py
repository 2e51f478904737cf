"""torchvision, timm and vit-pytorch, also where torchvision's wheel does not load.

The wheel on PyPI is linked to torch's CUDA build, as is torch's own wheel there. Beside a CPU build
its C++ operators are absent, and `import torchvision` ends in "operator torchvision::nms does not
exist", which `transformers` and others would meet too as soon as torchvision can be found. So
`make` installs it into a folder of its own. Its models and transforms are Python that needs none of
these operators, but two of their names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ecosystem.case import Numbers, case, of_pictures, whole_numbers

FOLDER = Path(sys.prefix) / "vision"
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
PICTURES = whole_numbers(256, 2, 3, 16, 16).to(torch.uint8)


@functools.cache
def _declared() -> torch.library.Library | None:
    """Find torchvision, and declare the two operators where it cannot bring them."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(FOLDER))
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"no torchvision in {FOLDER}: make .venv/.dev-installed")
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
        return None
    except OSError:
        names = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            names.define(name + SIGNATURE)
        return names


def vision(module: str) -> Any:
    """A module of torchvision, or of a library that imports it."""
    _declared()
    return importlib.import_module(module)


def convnext() -> torch.nn.Module:
    """timm's ConvNeXt, as small as its tests have it."""
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "num_classes": 4}
    return vision("timm").create_model("convnext_atto", **sizes)


def tiny() -> torch.nn.Module:
    """timm's ViT with one layer."""
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 4, "num_classes": 4}
    return vision("timm").create_model("vit_tiny_patch16_224", **sizes)


def vit() -> torch.nn.Module:
    """vit-pytorch's ViT."""
    sizes = {"image_size": 32, "patch_size": 8, "num_classes": 4, "dim": 32}
    return vision("vit_pytorch").ViT(**sizes, depth=1, heads=4, mlp_dim=64)


def resnet18() -> torch.nn.Module:
    """torchvision's ResNet-18, in the widths of its paper."""
    return vision("torchvision").models.resnet18(num_classes=4)


of_pictures("timm", "ConvNeXt atto", convnext, on_a_mesh=None)
of_pictures("timm", "ViT tiny", tiny, on_a_mesh=None)
of_pictures("vit-pytorch", "ViT", vit, on_a_mesh=None)
of_pictures("torchvision", "resnet18", resnet18, side=64, rate=1e-4, on_a_mesh=None)


@case("torchvision", "v2 transforms of uint8 tensors", rtol=1e-6)
def _transforms(device: str) -> Numbers:
    v2 = vision("torchvision.transforms.v2")
    by, pictures = v2.functional, PICTURES.to(device)
    found = [
        by.adjust_brightness(pictures, 1.3),
        by.adjust_contrast(pictures, 0.7),
        by.adjust_hue(pictures, 0.1),
        by.rotate(pictures, 30.0),
        by.affine(pictures, 10.0, [1, 2], 1.1, [5.0, 0.0]),
        by.erase(pictures, 2, 3, 4, 5, torch.zeros(1, 1, 1, dtype=torch.uint8).to(device)),
        by.equalize(pictures),
        by.posterize(pictures, 3),
        by.solarize(pictures, 128.0),
        by.horizontal_flip(by.center_crop(pictures, [8, 8])),
        by.normalize(by.to_dtype(pictures, torch.float32, scale=True), [0.5] * 3, [0.2] * 3),
    ]
    return [*found, *_by_chance(device, v2.AutoAugment(), v2.RandAugment())]


@case("torchvision", "v2 transforms through floats: +-1 of 255", rtol=1.01 / 200)
def _through_floats(device: str) -> Numbers:
    v2 = vision("torchvision.transforms.v2")
    resized = v2.Resize((9, 12)), v2.Resize((24, 24)), v2.RandomResizedCrop(8)
    found = _by_chance(device, *resized, v2.ColorJitter(saturation=0.4), v2.RandomAutocontrast(1.0))
    return [one.float() for one in found]


def _by_chance(device: str, *transforms: torch.nn.Module) -> Numbers:
    found = []
    for transform in transforms:
        torch.manual_seed(0)
        found.append(transform(PICTURES.to(device)))
    return found
