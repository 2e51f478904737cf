"""JAX's coordination service in memory, which counts; and ranks as threads."""

from __future__ import annotations

import collections
import threading

import jax


class Store:
    """What JAX's coordination service keeps, with the requests and bytes of each thread."""

    def __init__(self):
        self.kept, self.lock = {}, threading.Lock()
        self.there = collections.defaultdict(threading.Event)
        self.requests, self.bytes = collections.Counter(), collections.Counter()

    def _note(self, *said):
        self.requests[threading.current_thread().name] += 1
        self.bytes[threading.current_thread().name] += sum(map(len, said))

    def key_value_set(self, key, value):
        with self.lock:
            self._note(key, value)
            if key in self.kept:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.kept[key] = value
            self.there[key].set()

    def key_value_increment(self, key, by):
        with self.lock:
            self._note(key)
            self.kept[key] = str(int(self.kept.get(key, 0)) + by)
            return int(self.kept[key])

    def blocking_key_value_get(self, key, milliseconds):
        with self.lock:
            there = self.there[key]
        came = there.wait(milliseconds / 1000)
        with self.lock:
            self._note(key, self.kept.get(key, ""))
            if not came:
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.kept[key]

    def key_value_try_get(self, key):
        with self.lock:
            self._note(key, self.kept.get(key, ""))
            if key not in self.kept:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.kept[key]

    def key_value_dir_get(self, key):
        with self.lock:
            found = [(name, self.kept[name]) for name in self.kept if name.startswith(key)]
            self._note(key, *(value for _, value in found))
            return found

    def key_value_delete(self, key):
        with self.lock:
            self._note(key)
            for name in [one for one in self.kept if one == key or one.startswith(f"{key}/")]:
                del self.kept[name], self.there[name]


def run(size, work):
    """Do something in so many threads; the results, or errors, by rank."""
    found = [None] * size

    def one(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(n,), name=str(n)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
