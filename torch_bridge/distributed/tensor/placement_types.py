"""torch.distributed.tensor.placement_types' names: torch's own placements."""

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
