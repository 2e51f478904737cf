"""The limit of open files, in processes of their own: it can be lowered once only."""

import resource

from isoshard.core.processes.start import raise_file_limit
from tests import fresh

CASES = [(0, 200, 4096), (3, 200, 4096), (0, 8, 4096), (0, 1024, 2048)]
"""Rank, number of ranks, and the most that the machine allows."""
CODE = f"""
import os, resource, warnings
from isoshard.core.processes.start import raise_file_limit
for rank, size, most in {CASES}:
    if os.fork():
        os.wait()
        continue
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        room = raise_file_limit(rank, size)
    words = [f"{{one.category.__name__}}: {{one.message}}" for one in told]
    print(room, resource.getrlimit(resource.RLIMIT_NOFILE), *words, flush=True)
    os._exit(0)
"""


def test_a_run_of_many_raises_its_limit_or_says_what_the_machine_does_not_allow(tmp_path):
    done = fresh.run(CODE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, other, few, short = done.stdout.splitlines()
    limit = 512 + 6 * 200
    assert first == f"{limit} ({limit}, 4096)"
    assert other == f"{512 + 3 * 200} ({512 + 3 * 200}, 4096)"
    assert few == "1024 (1024, 4096)"
    assert short.startswith(
        "2048 (2048, 2048) ClusterWarning: rank 0 of 1024 may open 2048 files, and its "
        "connections need some 6656: "
    )


def test_this_process_keeps_its_own():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit(0, 2) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
