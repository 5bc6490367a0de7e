"""Looking at processes from outside, and waiting for what they do."""

import contextlib
import pathlib
import time


def alive(pid):
    """Whether a process runs (one that only waits to be reaped does not)."""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, deadline_secs=20):
    """Returns once `condition()`; fails the test after `deadline_secs`."""
    deadline = time.monotonic() + deadline_secs
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
