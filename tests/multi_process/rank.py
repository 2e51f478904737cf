"""What every rank runs: `rank.py JOB SCRATCH [args of the job ..]`; see `ranks`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Start the runtimes, run the checks in order, and write a report after each."""
    from tests.multi_process.ranks import World, checks_of, job_module

    _, job, scratch, *_ = sys.argv
    module = job_module(job)
    module.start()
    import jax

    world = World(jax.process_index(), jax.process_count(), Path(scratch))
    told: dict[str, str] = {}
    for name in checks_of(module):
        try:
            getattr(module, name)(world)
            told[name] = "passed"
        except BaseException:
            told[name] = traceback.format_exc()
            raise  # isoshard tells the other ranks, and they end
        finally:
            path = world.scratch / f"report-{world.rank}.json"
            path.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
