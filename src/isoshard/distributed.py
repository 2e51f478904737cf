"""Several processes: started by the cluster's variables, and ended together.

```python
processes = iso.distributed.init_distributed()  # before any array is made
with iso.distributed.Termination(grace=20) as termination:
    ...  # SIGTERM ends all after one step
```
"""

from isoshard.core.processes import Processes, Termination, init_distributed

__all__ = ["Processes", "Termination", "init_distributed"]


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
