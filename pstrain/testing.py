"""Clusters for tests, this project's and its users'.

`cluster` is a cluster within the process: fast, and enough for everything but
death. `ProcessCluster` runs the real commands, a process each, which can be
killed, stopped and started again.
"""

import contextlib
import signal as signal_lib
import time

from pstrain import errors, ports, processes
from pstrain.cluster import Cluster, Task

_TAIL_LINES = 30


@contextlib.contextmanager
def cluster(num_ps=2, num_workers=2):
    """A cluster within this process, as a context manager or pytest fixture.

    Servers cannot be stopped, so those of earlier tests are used again; a test
    costs some 0.2 s more for its cluster than without. A process may have any
    number of clusters, of any sizes, one after the other, each with its own
    strategy; and a test whose step failed does not disturb the next. Give up a
    cluster's strategy and variables before the next one is entered: TensorFlow
    cannot reach them any more.

    Example:

    ```python
    @pytest.fixture
    def cluster():
        with pstrain.testing.cluster(num_ps=2, num_workers=2) as cluster:
            yield cluster
    ```

    Args:
        num_ps: int, how many parameter servers.
        num_workers: int, how many workers.

    Yields:
        A `Cluster`, whose chief is this process.
    """
    from pstrain import local

    with local.LocalCluster(num_ps, num_workers) as running:
        yield running.cluster


class ProcessCluster:
    """A cluster of OS processes on this machine, as a context manager.

    All processes end with the context, also if this process is killed.

    Example:

    ```python
    with ProcessCluster(2, 2, flags=["--last_step=100"]) as cluster:
        cluster.wait_for_output("worker 0", "step 50", deadline_secs=120)
        cluster.kill("worker 1")
        cluster.restart("worker 1")
        codes = cluster.wait(deadline_secs=120)
    assert set(codes.values()) == {0}, codes
    ```

    Tasks are given as `Task` or by name, "ps 0". What a wait needs and does not
    get by its deadline raises a `JobError` with the end of the output.

    Attributes:
        cluster: the `Cluster`.
        tasks: list of its `Task`s: ps, workers, chief.

    Args:
        num_ps: int, how many parameter servers.
        num_workers: int, how many workers.
        chief: bool, whether there is a chief; else worker 0 coordinates.
        flags: iterable of str, further flags for every task.
        program: list of str, what to run with the flags; None: `python -m pstrain`.
        env: dict of str, changes to the environment.
        start: bool, whether to start all tasks on entry.
    """

    def __init__(
        self,
        num_ps=2,
        num_workers=2,
        chief=False,
        flags=(),
        program=None,
        env=None,
        start=True,
    ):
        addresses = [
            f"127.0.0.1:{port}"
            for port in ports.free_ports(num_ps + num_workers + chief)
        ]
        self.cluster = Cluster(
            ps=tuple(addresses[:num_ps]),
            workers=tuple(addresses[num_ps : num_ps + num_workers]),
            chief=addresses[-1] if chief else None,
        )
        self.tasks = self.cluster.tasks() + ([Task("chief", 0)] if chief else [])
        self._flags = tuple(flags)
        self._program = program
        self._env = processes.task_environment(**(env or {}))
        self._start_all = start
        self._group = processes.ProcessGroup()
        self._lines = {}
        self._pids = {}
        self._codes = {}

    def __enter__(self):
        """Starts the tasks."""
        self._group.__enter__()
        if self._start_all:
            for task in self.tasks:
                self.start(task)
        return self

    def __exit__(self, *exc_info):
        """Ends what still runs."""
        self._group.__exit__(*exc_info)

    def start(self, task, flags=()):
        """Starts a task, with `flags` besides those of the cluster."""
        name = str(task)
        (task,) = (t for t in self.tasks if str(t) == name)
        self._drain()
        if name in self._pids and name not in self._codes:
            raise ValueError(f"{name} is running already")
        argv = processes.task_command(
            self.cluster, task, [*self._flags, *flags], self._program
        )
        self._lines[name] = []
        self._codes.pop(name, None)
        self._pids[name] = self._group.start(name, argv, self._env)

    def restart(self, task, flags=(), deadline_secs=30.0):
        """Starts a task again, once the earlier one has ended."""
        name = str(task)
        self._require(
            lambda: name in self._codes, deadline_secs, f"{name} did not end", name
        )
        self.start(task, flags)

    def kill(self, task, signum=signal_lib.SIGKILL):
        """Sends a signal to a task."""
        self._group.signal(signum, str(task))

    def pid(self, task):
        """The process id of a task, also of an ended one."""
        return self._pids[str(task)]

    def output(self, task):
        """All that a task has printed since it was started last."""
        self._drain()
        return "\n".join(self._lines[str(task)])

    def wait_for_output(self, task, text, deadline_secs=60.0):
        """Waits until a task, since started last, has printed a line with `text`.

        Returns:
            The line.
        """
        name = str(task)

        def found():
            return next((line for line in self._lines[name] if text in line), None)

        self._require(
            lambda: found() is not None or name in self._codes,
            deadline_secs,
            f"{name} did not print {text!r}",
            name,
        )
        if (line := found()) is None:
            self._fail(
                f"{name} ended with exit code {self._codes[name]} and did not print "
                f"{text!r}",
                name,
            )
        return line

    def wait(self, deadline_secs, tasks=None):
        """Waits until tasks have ended.

        Args:
            deadline_secs: float, for all of them.
            tasks: iterable of tasks; None: all that were started.

        Returns:
            Dict of exit codes by name, as a shell gives them (137 for `kill -9`).
        """
        names = [str(task) for task in (self._pids if tasks is None else tasks)]

        def running():
            return [name for name in names if name not in self._codes]

        self._require(lambda: not running(), deadline_secs, "not all ended", running)
        return {name: self._codes[name] for name in names}

    def _require(self, condition, deadline_secs, failure, names):
        if not self._pump_until(condition, deadline_secs):
            names = names() if callable(names) else [names]
            self._fail(f"{failure} within {deadline_secs:g} s", *names)

    def _pump_until(self, condition, deadline_secs):
        """Takes in events until `condition()`; whether it came true in time."""
        deadline = time.monotonic() + deadline_secs
        self._drain()
        while not condition():
            event = self._group.next_event(max(0.0, deadline - time.monotonic()))
            if event is None:
                return False
            self._take(event)
        return True

    def _drain(self):
        """Takes in the events that are there."""
        for _ in range(self._group.events.qsize()):
            self._take(self._group.next_event())

    def _take(self, event):
        if isinstance(event, processes.Ended):
            self._codes[event.name] = event.code
        else:
            self._lines[event.name].append(event.text)

    def _fail(self, failure, *names):
        tails = [
            f"--- {name}, the end of its output:\n"
            + "\n".join(self._lines[name][-_TAIL_LINES:])
            for name in names
        ]
        raise errors.JobError("\n".join([failure, *tails]))
