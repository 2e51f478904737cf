"""Tables that forget: a server whose shapes never end keeps a bounded number of each."""

import gc
import re
import threading
from pathlib import Path

from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import (
    Bounded,
    Interned,
    Recent,
    cache_sizes,
    cached,
    clear_caches,
)

ROOT = Path(__file__).resolve().parents[3]


def test_the_oldest_are_forgotten():
    table = Bounded(3, "test")
    for n in range(10):
        table[n] = str(n)
    assert table == {7: "7", 8: "8", 9: "9"} and table.get(0) is None
    table[7] = "again"
    assert list(table) == [7, 8, 9]


def test_several_threads_may_write():
    table = Bounded(10, "test")
    faults = []

    def write(begin):
        try:
            for n in range(begin, begin + 2_000):
                table[n] = n
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(n * 2_000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults and len(table) <= 14


def test_compilations_are_listed_up_to_a_number(monkeypatch):
    assert metrics._compilations.maxlen == 10_000
    metrics.reset()
    for n in range(10_050):
        metrics.record_compilation(f"program {n}", "test", "here", 0.0)
    listed = metrics.compilations()
    assert len(listed) == 10_000 and listed[-1].what == "program 10049"
    assert metrics.counters()["compilations"] == 10_050
    metrics.reset()


class Thing:
    """Something that can be held weakly."""


def test_what_is_used_stays():
    table = Recent(10, "test")
    table["used"] = "kept"
    for n in range(100):
        table[n] = n
        assert table.lookup("used") == "kept"
    assert table.lookup(0) is None and table.lookup(99) == 99
    assert len(table) + len(table.older) <= 10
    assert Recent.get is dict.get


def test_what_is_alive_is_found_and_what_is_dead_is_gone():
    table = Interned(10, "test")
    held = table["held"] = Thing()
    for n in range(100):
        table[n] = Thing()
    gc.collect()
    assert "held" not in table and table.lookup("held") is held and "held" in table
    assert table.lookup(0) is None
    assert len(table.alive) <= 11
    assert table.intern("held", Thing()) is held


def test_threads_that_intern_one_key_get_one_value():
    table = Interned(8, "test")
    barrier = threading.Barrier(4)
    found = [[] for _ in range(4)]

    def intern(number):
        for key in range(100):
            barrier.wait(20)
            found[number].append(table.lookup(key) or table.intern(key, Thing()))

    threads = [threading.Thread(target=intern, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(set(map(id, same))) == 1 for same in zip(*found, strict=True))


def test_tables_of_one_name_are_counted_together_while_they_live():
    tables = [Bounded(4, "of objects"), Recent(4, "of objects")]
    for n, table in enumerate(tables):
        table[n] = n
    assert cache_sizes()["of objects"] == (2, 4, 2)
    del table, tables[0]
    gc.collect()
    assert cache_sizes()["of objects"] == (1, 4, 1)


def test_all_caches_are_emptied_but_those_that_processes_agreed_on():
    plain, recent, agreed = Bounded(8, "a"), Recent(8, "b"), Bounded(8, "c", agreed=True)

    @cached(8, "d")
    def doubled(x):
        return [2 * x]

    first = doubled(1)
    for n in range(6):
        plain[n] = recent[n] = agreed[n] = n
    clear_caches()
    assert not plain and not recent and recent.lookup(5) is None and len(agreed) == 6
    assert doubled(1) == first and doubled(1) is not first and doubled(1) is doubled(1)


def test_an_interned_value_that_lives_is_the_same_after_clearing():
    table = Interned(8, "interned")
    kept, dropped = Thing(), Thing()
    table.intern("kept", kept)
    table.intern("dropped", dropped)
    del dropped
    clear_caches()
    assert table.lookup("kept") is kept and table.lookup("dropped") is None
    assert table.intern("kept", Thing()) is kept


def test_no_cache_of_a_module_is_outside_of_the_registry():
    """`functools.cache` is for what has no arguments, or so few that they need no bound."""
    unlisted = re.compile(r"^(?:@|\w+ = )(?:functools\.)?lru_cache\(", re.MULTILINE)
    folders = ("core", "jax_bridge", "torch_bridge", "onnx_bridge", "src")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 500
    assert not [str(path) for path in paths if unlisted.search(path.read_text())]
