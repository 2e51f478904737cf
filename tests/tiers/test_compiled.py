"""The folder of compiled programs stays small: the oldest go first."""

import os

from tiers import compiled


def test_the_oldest_programs_go(tmp_path):
    for age, name in enumerate(["new", "middle", "old"]):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(b"x" * 10)
        os.utime(path, (1000 - age, 1000 - age))
    assert compiled.prune(tmp_path, limit=25) == (2, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle-cache", "new-cache"]


def test_a_folder_that_is_not_there_is_empty(tmp_path):
    assert compiled.prune(tmp_path / "none") == (0, 0)


def test_the_command_says_what_there_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "one-cache").write_bytes(b"x")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    compiled.main()
    assert capsys.readouterr().out.startswith("1 compiled programs of earlier runs, 0 MiB, in ")
