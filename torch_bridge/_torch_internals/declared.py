"""The table of torch's private names; the other modules of this folder fill it."""

from isoshard.core.runtime.private_names import TRIED, PrivateNames
from isoshard.torch_bridge.common.old_torch import has_device

NAMES = PrivateNames("torch", versions=TRIED["torch"])
"""The rows; one without versions of its own exists in all versions that were tried."""

if has_device():  # old_torch.py covers an older torch
    NAMES.warn_if_untested()
NO_DEVICE = "no tensor can be made on the device"
"""The consequence of a missing name without which nothing on the device works."""
