"""The suite's own machinery, on small files written here: no part of PyTorch's is needed."""

import ast
import json
import textwrap

import pytest

from tests import fresh
from tests.dtensor_suite import __main__ as command
from tests.dtensor_suite import common, renaming
from tests.dtensor_suite.settings import Settings

HEAD = """
import torch
from torch.distributed._tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.distributed._tensor.placement_types import Partial
from torch.distributed.tensor.debug import CommDebugMode
import torch.distributed as dist
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase, MLPModule, NUM_DEVICES, with_comms,
)


class Cases(DTensorTestBase):
"""

CASES = {
    "test_passes": """
        mesh = self.build_device_mesh()
        x = torch.arange(8.0, device=self.device_type)
        t = distribute_tensor(x, mesh, [Shard(0)])
        assert type(t).__module__.startswith("isoshard") and NUM_DEVICES == 4
        self.assertEqual(t.to_local(), torch.arange(2.0))  # of rank 0
        with CommDebugMode() as comm_mode:
            self.assertEqual((t + 1).full_tensor(), x + 1)
        self.assertEqual(comm_mode.get_total_counts(), 77)  # not counted
        self.assertEqual(MLPModule(self.device_type).net1.weight.shape, (16, 10))
        if dist.get_rank() == 0:
            with self.assertRaisesRegex(ValueError, "same length"):
                distribute_tensor(x, mesh, [Shard(0), Shard(0)])
    """,
    "test_uneven_pieces": """
        t = distribute_tensor(torch.arange(5.0), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(t.to_local(), torch.arange(2.0))
    """,
    "test_differs": """
        t = distribute_tensor(torch.ones(8), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(t.to_local(), torch.zeros(2))
    """,
    "test_another_class_of_error": """
        with self.assertRaisesRegex(KeyError, "same length"):
            distribute_tensor(torch.ones(8), self.build_device_mesh(), [Shard(0)] * 2)
    """,
    "test_other_placements": """
        t = DTensor.from_local(torch.ones(8), self.build_device_mesh(), [Partial()])
        self.assertTrue(t.placements[0].is_partial())
        self.assertEqual(t.full_tensor(), torch.full((8,), 4.0))
    """,
    "test_other_words": """
        with self.assertRaisesRegex(ValueError, "no such words"):
            distribute_tensor(torch.ones(8), self.build_device_mesh(), [Shard(0)] * 2)
    """,
    "test_needs_ranks": """
        dist.all_reduce(torch.ones(2))
    """,
    "test_a_private_name": """
        from torch.distributed.tensor._nowhere import gone
        gone(self)
    """,
    "test_that_ends_the_process": """
        raise SystemExit(3)
    """,
}
WANTED = {
    "test_passes": "pass",
    "test_uneven_pieces": "pass",
    "test_differs": "differ",
    "test_another_class_of_error": "differ",
    "test_other_placements": "values",
    "test_other_words": "values",
    "test_needs_ranks": "ranks",
    "test_a_private_name": "ranks",
    "test_that_ends_the_process": "differ",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tree as PyTorch's, with one file."""
    root = tmp_path_factory.mktemp("pytorch")
    place = root / "distributed" / "_tensor"
    place.mkdir(parents=True)
    methods = (f"    @with_comms\n    def {name}(self):{body}" for name, body in CASES.items())
    (place / "test_small.py").write_text(HEAD + "\n".join(methods))
    return root


PROGRAM = """
    import functools, sys
    sys.path.insert(0, sys.argv.pop(1))
    from tests.dtensor_suite import __main__ as command
    from tools.harness.workers import Lost

    @functools.cache
    def started(start, **options):
        return start(**options)

    def answers(tasks, start, *, options, **_):
        run = started(start, **options)
        for task in tasks:
            try:
                yield task, run(*task)
            except SystemExit as end:
                yield task, Lost("crash", f"the process ended ({end})")

    command.answers = answers
    sys.exit(command.main(sys.argv[1:]))
"""
"""The command, whose worker is its own process, and does not end."""


@pytest.fixture(scope="module")
def found(folder):
    """What the command keeps, and what it prints."""
    kept = folder / "kept.json"
    arguments = [str(fresh.ROOT), str(folder), "test_small.py", "--json", str(kept)]
    done = fresh.run(textwrap.dedent(PROGRAM), arguments, cwd=folder)
    assert done.returncode == 1, done.stderr  # something differs
    return {**json.loads(kept.read_text()), "said": done.stdout}


def test_each_case_comes_to_what_it_is(found):
    cases = found["results"]["test_small"].items()
    assert {name.partition("::")[2]: case["status"] for name, case in cases} == WANTED
    assert "| `test_small` | 9 | 2 | 2 | 3 | 2 |" in found["said"]


def test_reasons_are_kept(found):
    cases = {name.partition("::")[2]: case for name, case in found["results"]["test_small"].items()}
    assert cases["test_passes"]["reasons"] == []
    assert "Tensor-likes are not close" in cases["test_differs"]["reasons"][0]
    assert cases["test_other_placements"]["reasons"] == ["placements: False is not true"]
    assert "for 'no such words'" in cases["test_other_words"]["reasons"][0]
    assert cases["test_a_private_name"]["reasons"] == [
        "private: torch.distributed.tensor._nowhere.gone"
    ]
    assert cases["test_that_ends_the_process"]["reasons"] == ["crash: the process ended (3)"]
    assert {"command", "versions", "machine"} <= found.keys()


def test_strictly_placements_are_as_good_as_values(monkeypatch):
    def fail():
        raise AssertionError("no such placements")

    with common.noted("placements"):
        fail()
    assert common.NOTES.pop() == ("placements", "no such placements")
    monkeypatch.setattr(Settings, "strict", True)
    with pytest.raises(AssertionError, match="no such"), common.noted("placements"):
        fail()
    assert not common.NOTES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"holds none of distributed/_tensor.*give PyTorch's folder `test`"),
        (["test_none"], r"no file test_none in .*; there are test_small"),
    ],
)
def test_what_is_not_there(folder, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        command.main([str(folder if arguments else tmp_path), *arguments])


def test_lines_that_are_known_to_differ_are_noted():
    source = "def f(self):\n    x = 1\n    with self.assertRaises(E):\n        x()\n"
    text = ast.unparse(renaming.renamed(source, "x.py", {3: "works here"}))
    assert (
        "with __suite__.noted('decided', 'works here'):\n        with self.assertRaises(E)" in text
    )
    assert text.count("noted") == 1
