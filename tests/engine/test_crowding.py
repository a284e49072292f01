"""Threads give way while other programs want the cores, and come back."""

from __future__ import annotations

from localfast.engine.crowding import ThreadCount


def run(threads: ThreadCount, seconds: float, cores: float, step_s: float = 0.05) -> None:
    """Steps on a machine that has so many cores to give."""
    for _ in range(int(seconds / step_s)):
        threads.observe(step_s, min(threads.now, cores) * step_s)


def test_crowding_free_machine_keeps_all_threads() -> None:
    threads = ThreadCount(8)
    run(threads, 60, cores=8)
    assert threads.now == 8


def test_crowding_threads_without_a_core_are_given_up() -> None:
    threads = ThreadCount(2)
    run(threads, 0.6, cores=1.3)
    assert threads.now == 1
    threads = ThreadCount(8)
    run(threads, 0.6, cores=5.2)
    assert threads.now == 5


def test_crowding_one_thread_is_always_left() -> None:
    threads = ThreadCount(2)
    run(threads, 0.6, cores=0.1)
    assert threads.now == 1
    single = ThreadCount(1)
    run(single, 5, cores=0.5)
    assert single.now == 1


def test_crowding_all_threads_come_back_once_the_cores_are_free() -> None:
    threads = ThreadCount(2)
    run(threads, 1, cores=1.3)
    run(threads, 3, cores=2)
    assert threads.now == 2


def test_crowding_tries_get_rarer_while_the_machine_stays_busy() -> None:
    threads = ThreadCount(2)
    tried = []
    for step in range(2400):
        threads.observe(0.05, min(threads.now, 1.3) * 0.05)
        tried += [step] if threads.now == 2 else []
    assert len(tried) < 120, "under 6 s of two minutes were spent on trying"
