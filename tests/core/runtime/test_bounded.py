"""Tables that forget: a server whose shapes never end keeps a bounded number of each."""

import gc
import threading

from isoshard.core.runtime import metrics
from isoshard.core.runtime.bounded import Bounded, Interned, Recent


def test_the_oldest_are_forgotten():
    table = Bounded(3)
    for n in range(10):
        table[n] = str(n)
    assert table == {7: "7", 8: "8", 9: "9"} and table.get(0) is None
    table[7] = "again"
    assert list(table) == [7, 8, 9]


def test_several_threads_may_write():
    table = Bounded(10)
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
    table = Recent(10)
    table["used"] = "kept"
    for n in range(100):
        table[n] = n
        assert table.lookup("used") == "kept"
    assert table.lookup(0) is None and table.lookup(99) == 99
    assert len(table) + len(table.older) <= 10
    assert Recent.get is dict.get


def test_what_is_alive_is_found_and_what_is_dead_is_gone():
    table = Interned(10)
    held = table["held"] = Thing()
    for n in range(100):
        table[n] = Thing()
    gc.collect()
    assert "held" not in table and table.lookup("held") is held and "held" in table
    assert table.lookup(0) is None
    assert len(table.alive) <= 11
    assert table.intern("held", Thing()) is held


def test_threads_that_intern_one_key_get_one_value():
    table = Interned(8)
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
