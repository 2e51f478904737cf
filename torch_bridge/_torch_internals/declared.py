"""The table of torch's private names; the other modules of this folder fill it."""

from isoshard.core.runtime.private_names import TRIED, PrivateNames
from isoshard.torch_bridge.common.old_torch import has_device

NAMES = PrivateNames("torch", versions=TRIED["torch"])
"""What every row without versions of its own is known to be in."""

if has_device():  # what an older torch lacks, old_torch.py says
    NAMES.warn_if_untested()
NO_DEVICE = "no tensor can be made on the device"
"""What rows are without that nothing on the device works without."""
