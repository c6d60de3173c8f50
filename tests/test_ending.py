"""Programs end with exit code 0, whatever workers still hold; `ending_late.py` is the program."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardfield.comm import ending

PROGRAM = str(Path(__file__).parent / "ending_late.py")


@pytest.fixture(scope="module")
def runs():
    """(exit code, errors) of the program that waits for its worker, and of one that does not."""
    command = [sys.executable, PROGRAM]
    started = [
        subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        for arguments in ([], ["abandon"])
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]


def test_a_program_waits_for_workers_before_it_ends(runs):
    code, errors = runs[0]
    assert code == 0, errors


def test_without_waiting_the_same_program_aborts(runs):
    # The day this fails torch has mended it, and `comm/ending.py` can go.
    code, errors = runs[1]
    assert code == -6, errors
    assert "terminate called without an active exception" in errors


def waited() -> float:
    start = time.monotonic()
    ending.wait_for_workers()
    return time.monotonic() - start


def test_the_wait_lasts_while_another_thread_is_at_work_and_has_a_limit(monkeypatch):
    monkeypatch.setattr(ending, "_LIMIT", 0.5)
    enough = threading.Event()

    def work():
        while not enough.is_set():
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert 0.5 <= waited() < 5
    finally:
        enough.set()
        thread.join()


def test_where_nobody_says_what_threads_do_the_wait_is_a_fixed_time(monkeypatch, tmp_path):
    monkeypatch.setattr(ending, "_THREADS", tmp_path / "none")
    assert 0.05 <= waited() < 0.9
