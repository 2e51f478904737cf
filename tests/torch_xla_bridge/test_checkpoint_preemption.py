"""SIGTERM: the next step is saved, and the handlers of others keep working."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal

import pytest

from isoshard.torch_bridge.checkpoints import CheckpointManager
from isoshard.torch_bridge.checkpoints.preemption import Watch


@pytest.fixture(autouse=True)
def handler():
    """Whatever a test does, the handler of before is back after it."""
    before = signal.getsignal(signal.SIGTERM)
    yield before
    after = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert after == before


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_step_after_sigterm_is_saved(tmp_path, caplog, handler):
    with CheckpointManager(tmp_path, 100) as manager:
        assert [step for step in range(1, 10) if manager.save(step, {"n": step})] == []
        assert not manager.reached_preemption(9)
        terminate()
        assert manager.should_save(10)
        assert manager.save_async(10, {"n": 10})
        assert manager.reached_preemption(10)
        manager.join()
        assert manager.all_steps() == [10]
    assert [r.getMessage() for r in caplog.records if "SIGTERM" in r.getMessage()] == [
        "SIGTERM arrived: a checkpoint of step 10 is due"
    ]
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False):
        assert signal.getsignal(signal.SIGTERM) == handler


def test_the_handler_of_before_is_called_and_put_back(tmp_path, handler):
    seen = []

    def mine(number, frame):
        seen.append(number)

    signal.signal(signal.SIGTERM, mine)
    with CheckpointManager(tmp_path, 100) as manager:
        assert signal.getsignal(signal.SIGTERM) is not mine
        terminate()
        assert manager.reached_preemption(1)
        assert seen == [signal.SIGTERM]
        manager.join()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert manager.should_save(2)  # it watches again
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ignored, it stays so
    with Watch() as watch:
        terminate()
        assert watch.reached
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, handler)


def test_several_watch_and_each_may_stop_first(handler):
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        watches = [Watch() for _ in range(3)]
        for watch in watches:
            watch.start()
        watches[order[0]].stop()
        terminate()
        assert [watch.reached for watch in watches] == [n != order[0] for n in range(3)]
        for number in order[1:]:
            assert signal.getsignal(signal.SIGTERM) != handler
            watches[number].stop()
        assert signal.getsignal(signal.SIGTERM) == handler


def test_a_handler_put_on_top_is_not_taken_away(handler):
    seen = []
    watch = Watch()
    watch.start()
    below = signal.getsignal(signal.SIGTERM)

    def on_top(number, frame):
        seen.append("on top")
        below(number, frame)

    signal.signal(signal.SIGTERM, on_top)
    terminate()
    assert watch.reached and seen == ["on top"]
    watch.stop()
    assert signal.getsignal(signal.SIGTERM) is on_top
    signal.signal(signal.SIGTERM, below)
    again = Watch()
    with again:
        terminate()
    assert again.reached
    assert signal.getsignal(signal.SIGTERM) == handler


def test_only_the_main_thread_can_watch(tmp_path):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        error = threads.submit(CheckpointManager, tmp_path, 1).exception()
    assert isinstance(error, RuntimeError)
    assert "only the main thread can watch for SIGTERM" in str(error)
    assert "chkpt_on_preemption=False" in str(error)


ENDS = """
import os, signal
from isoshard.torch_bridge.checkpoints.preemption import Watch

def child(how):
    watch = Watch()
    watch.start()
    os.kill(os.getpid(), signal.SIGTERM)
    assert watch.reached
    below = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *args: below(*args))   # so that stop cannot take ours away
    if how == "stop":
        watch.stop()
    else:
        del watch
    print("alive after the first,", end=" ", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("and the second", flush=True)

for how in ("stop", "forget"):
    number = os.fork()
    if not number:
        child(how)
        os._exit(0)
    print(how, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
"""


def test_sigterm_ends_the_process_again_when_nobody_watches(processes):
    done = processes.run("-c", ENDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alive after the first, stop -15\nalive after the first, forget -15\n"


def test_a_forgotten_manager_watches_no_longer(tmp_path, handler):
    manager = CheckpointManager(tmp_path, 1)
    terminate()
    assert manager.reached_preemption(1)
    del manager
    gc.collect()
    with Watch() as watch:
        assert not watch.reached
    assert signal.getsignal(signal.SIGTERM) == handler
