"""The limit of open files, in processes of their own: it can be lowered once only."""

import resource
import subprocess
import sys

import pytest

_CODE = """
import resource, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
from isoshard.core.processes.open_files import make_room
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(make_room({rank}, {size}), resource.getrlimit(resource.RLIMIT_NOFILE))
    print(*(f"{{one.category.__name__}}: {{one.message}}" for one in told))
"""


def _lines(rank, size, limits):
    code = _CODE.format(rank=rank, size=size, limits=limits)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(("rank", "limit"), [(0, 512 + 6 * 200), (3, 512 + 3 * 200)])
def test_a_run_of_many_raises_its_limit(rank, limit):
    assert _lines(rank, 200, (1024, 4096)) == [f"{max(limit, 1024)} ({max(limit, 1024)}, 4096)", ""]


def test_a_run_of_few_leaves_it():
    assert _lines(0, 8, (1024, 4096)) == ["1024 (1024, 4096)", ""]


def test_it_says_what_the_machine_does_not_allow():
    limit, told = _lines(0, 1024, (1024, 2048))
    assert limit == "2048 (2048, 2048)"
    assert told.startswith(
        "ClusterWarning: rank 0 of 1024 may open 2048 files, and its connections need some 6656: "
    )


def test_this_process_keeps_its_own():
    from isoshard.core.processes.open_files import make_room

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert make_room(0, 2) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
