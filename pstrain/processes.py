"""One OS process per task, started here, and none left behind.

The local launcher (tools/launch.py) and `pstrain.testing.ProcessCluster` start
the tasks of a cluster through this. Output comes back line by line through a
queue of events, in order, together with the ends of processes; so whoever
reads the queue needs no locks and sees a process end after its last line.

Every process leads a session of its own: Ctrl-C on the terminal reaches only
the launcher, which can let the coordinator save first; and whatever a task
started itself can be killed with it. If this process is killed, even with
`kill -9`, the guard (see `_GUARD`) kills the tasks.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

# Runs as a process of its own and reads which sessions exist ("+ 17") and which
# have ended ("- 17"). Its input ends when we do, however that happens; then it
# kills what is left. The kernel's parent-death signal would not do: it is bound
# to the thread that started the child, spares grandchildren, and is Linux only.
_GUARD = """
import os, signal, sys
sessions = set()
for line in sys.stdin:
    sign, pid = line.split()
    (sessions.add if sign == "+" else sessions.discard)(int(pid))
for pid in sessions:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""

# Only a daemon that left the session can keep the output open for longer.
_LAST_LINES_SECS = 5.0
_SIGNAL_POLL_SECS = 0.5


@dataclasses.dataclass(frozen=True)
class Line:
    """A process printed a line (to stdout or stderr)."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process ended, after all its lines; `code` as a shell gives it."""

    name: str
    code: int


class ProcessGroup:
    """Named processes that end with this object, as a context manager.

    Attributes:
        events: queue.SimpleQueue of `Line`, `Ended`, and whatever else the owner
            puts into it (it may, also from a signal handler).
    """

    def __init__(self):
        self.events = queue.SimpleQueue()
        self._running = {}
        self._guard = None
        self._guard_lock = threading.Lock()

    def __enter__(self):
        """Starts the guard."""
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc_info):
        """Ends all processes: SIGTERM, and SIGKILL 5 s later."""
        for signum, grace_secs in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            self.signal(signum)
            deadline = time.monotonic() + grace_secs
            for _, watcher in list(self._running.values()):
                watcher.join(max(0.0, deadline - time.monotonic()))
        self._guard.stdin.close()
        self._guard.wait()

    def start(self, name, argv, env=None):
        """Starts a process.

        Args:
            name: str, the name in events, not used by a running process.
            argv: list of str.
            env: dict, the environment; None: that of this process.

        Returns:
            Its process id.
        """
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            self._tell_guard("+", process.pid)
        except OSError:
            # Without the guard, nothing would end it after us.
            _kill_session(process.pid)
            raise
        watcher = threading.Thread(
            target=self._watch, args=(name, process), daemon=True
        )
        self._running[name] = process, watcher
        watcher.start()
        return process.pid

    def running(self):
        """Names of the processes that have not ended yet."""
        return list(self._running)

    def signal(self, signum, name=None):
        """Sends a signal to one process, or to all; ended ones are left out.

        SIGKILL goes to everything in a process's session.
        """
        for key, (process, _) in list(self._running.items()):
            if name not in (None, key):
                continue
            if signum == signal.SIGKILL:
                _kill_session(process.pid)
            else:
                process.send_signal(signum)

    def next_event(self, timeout_secs=None):
        """The next of `events`; None after `timeout_secs` (None: wait for ever)."""
        deadline = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        while True:
            left = max(0.0, deadline - time.monotonic())
            # In short waits: Python handles a signal when the main thread next
            # runs, and one that comes just before it blocks does not wake it.
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=min(left, _SIGNAL_POLL_SECS))
            if left == 0.0:
                return None

    def _watch(self, name, process):
        """Turns the life of a process into events; one thread each."""
        reader = threading.Thread(target=self._read, args=(name, process), daemon=True)
        reader.start()
        process.wait()
        # Its children could hold its output open, and would be left behind.
        _kill_session(process.pid)
        with contextlib.suppress(OSError):
            self._tell_guard("-", process.pid)
        reader.join(_LAST_LINES_SECS)
        code = process.returncode
        del self._running[name]
        self.events.put(Ended(name, code if code >= 0 else 128 - code))

    def _read(self, name, process):
        for line in process.stdout:
            self.events.put(Line(name, line.rstrip("\n")))

    def _tell_guard(self, sign, pid):
        with self._guard_lock:
            self._guard.stdin.write(f"{sign} {pid}\n")
            self._guard.stdin.flush()


def _kill_session(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def task_command(cluster, task, flags=(), program=None):
    """The command line that runs one task of a cluster.

    Args:
        cluster: the `Cluster`.
        task: the `Task`.
        flags: iterable of str, further flags.
        program: list of str, what to run; None: `python -m pstrain`.

    Returns:
        List of str.
    """
    program = [sys.executable, "-m", "pstrain"] if program is None else program
    chief = [f"--chief_host={cluster.chief}"] if cluster.chief else []
    return [
        *program,
        f"--job_name={task.job}",
        f"--task_index={task.index}",
        f"--ps_hosts={','.join(cluster.ps)}",
        f"--worker_hosts={','.join(cluster.workers)}",
        *chief,
        *flags,
    ]


def task_environment(**changes):
    """The environment for a task: that of this process, where pstrain is found.

    Args:
        **changes: str values to set.

    Returns:
        A dict.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **changes}
    # It would contradict the flags.
    env.pop("TF_CONFIG", None)
    root = str(pathlib.Path(__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return env
