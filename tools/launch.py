#!/usr/bin/env python
"""Runs a whole cluster on this machine, one OS process per task.

    python tools/launch.py --num_ps=2 --num_workers=2 -- --last_step=1000

starts what would otherwise be typed into four terminals, on free ports; each
line of output has the task before it. What comes after `--` goes to every task
(see `python -m pstrain --help`).

Ctrl-C goes to the coordinator, which saves and tells the servers to leave; a
second Ctrl-C does not wait for that. When a task fails, all are stopped. No
task outlives this command, even if it is killed.

The exit code is 0 if every task ended with 0; else that of the first task that
failed, or 130 after Ctrl-C.
"""

import argparse
import dataclasses
import pathlib
import shlex
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pstrain import cluster as cluster_lib  # noqa: E402
from pstrain import errors, ports, processes  # noqa: E402

# Servers leave within 5 s of being told; more is a fault worth a line.
_SERVERS_LEAVE_SECS = 10.0
_SIGNAL_SECS = 5.0

_NAME = "launch"


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """The launcher itself received a signal."""

    signum: int


class Launcher:
    """Runs the tasks of a cluster until all have ended.

    Args:
        group: the `ProcessGroup` in which the tasks run.
        names: list of str, the tasks.
        coordinator: str, the one that coordinates.
        grace_secs: float, how long it may take to save when it is interrupted.
    """

    def __init__(self, group, names, coordinator, grace_secs):
        self.group = group
        self.alive = set(names)
        self.coordinator = coordinator
        self.grace_secs = grace_secs
        self.exit_code = 0
        self.stopping = False
        # When patience ends, and what is then done to all that are left.
        self.deadline = None
        self.steps = [signal.SIGTERM, signal.SIGKILL]
        self._width = max(map(len, [*names, _NAME]))

    def run(self):
        """Prints and watches until every task has ended; the exit code."""
        while self.alive:
            left = None
            if self.deadline is not None:
                left = max(0.0, self.deadline - time.monotonic())
            match self.group.next_event(left):
                case processes.Line(name, text):
                    self.print(text, name)
                case processes.Ended(name, code):
                    self.alive.remove(name)
                    self.on_end(name, code)
                case Interrupt(signum):
                    self.on_interrupt(signum)
                case None:
                    self.on_overdue()
        return self.exit_code

    def on_end(self, name, code):
        """The end of a task is that of the job, if it failed or coordinated."""
        if code or self.stopping:
            self.print(f"{name} ended with exit code {code}")
        if code and not self.stopping:
            self.exit_code = code
            self.stop(signal.SIGINT)
        elif name == self.coordinator and len(self.steps) == 2:
            # It has told the servers to leave.
            self.deadline = time.monotonic() + _SERVERS_LEAVE_SECS

    def on_interrupt(self, signum):
        """Lets the coordinator save; the second time, there is no patience."""
        self.exit_code = self.exit_code or 128 + signum
        if self.stopping:
            self.next_step()
        else:
            self.stop(signum)

    def on_overdue(self):
        """Patience has ended: a fault, also if all went well before."""
        self.exit_code = self.exit_code or 1
        self.print(f"still running: {', '.join(sorted(self.alive))}")
        self.next_step()

    def stop(self, signum):
        """Begins to end the job, with the coordinator."""
        self.stopping = True
        secs = _SERVERS_LEAVE_SECS
        if self.coordinator in self.alive:
            # It alone: it needs the servers to save, and tells them to leave.
            self.group.signal(signum, self.coordinator)
            secs = self.grace_secs
        if self.alive:
            self.print(f"stopping, within {secs:g} s; Ctrl-C: at once")
        self.deadline = time.monotonic() + secs

    def next_step(self):
        """Ends the tasks that are left, more firmly from time to time."""
        if not self.steps:
            self.print("giving up; not even SIGKILL ends them")
            self.alive.clear()
            return
        signum = self.steps.pop(0)
        self.print(f"sending {signum.name} to {', '.join(sorted(self.alive))}")
        self.group.signal(signum)
        self.deadline = time.monotonic() + _SIGNAL_SECS

    def print(self, text, name=_NAME):
        """One line, with the task that it is from."""
        print(f"{name:<{self._width}} | {text}", flush=True)


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="tools/launch.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- flags of pstrain ...]",
    )
    parser.add_argument(
        "--num_ps", type=int, default=2, metavar="N", help="parameter servers (2)"
    )
    parser.add_argument(
        "--num_workers", type=int, default=2, metavar="N", help="workers (2)"
    )
    parser.add_argument(
        "--chief",
        action="store_true",
        help="run the coordinator as a task of its own, not within worker 0",
    )
    parser.add_argument(
        "--grace_secs",
        type=float,
        default=60.0,
        metavar="S",
        help="how long the coordinator may take to save after Ctrl-C (60)",
    )
    parser.add_argument(
        "--program",
        type=shlex.split,
        metavar="CMD",
        help="what to run for each task (python -m pstrain)",
    )
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.num_ps < 1 or options.num_workers < 1:
        parser.error("a cluster has at least 1 ps and 1 worker")
    return options


def main(argv=None):
    options = parse(argv)
    num_tasks = options.num_ps + options.num_workers
    addresses = [f"127.0.0.1:{p}" for p in ports.free_ports(num_tasks + 1)]
    cluster = cluster_lib.Cluster(
        ps=tuple(addresses[: options.num_ps]),
        workers=tuple(addresses[options.num_ps : num_tasks]),
        chief=addresses[-1] if options.chief else None,
    )
    tasks = cluster.tasks()
    if options.chief:
        tasks.append(cluster.coordinator_task)
    names = [str(task) for task in tasks]
    env = processes.task_environment()
    with processes.ProcessGroup() as group:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda n, frame: group.events.put(Interrupt(n)))
        for name, task in zip(names, tasks, strict=True):
            group.start(
                name,
                processes.task_command(cluster, task, options.flags, options.program),
                env,
            )
        coordinator = str(cluster.coordinator_task)
        return Launcher(group, names, coordinator, options.grace_secs).run()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (errors.PstrainError, OSError) as error:
        sys.exit(f"tools/launch.py: {error}")
