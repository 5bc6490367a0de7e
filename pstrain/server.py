"""A ps or worker task: serve until told to stop.

A TensorFlow server does the work: the coordinator places variables and runs
functions on it over the network, and it needs to know no address but its own,
since the coordinator hands the whole cluster to it when it connects. Here is
what TensorFlow leaves out: an end. The task serves until the coordinator says
that the job is over (see control.py), or until SIGINT or SIGTERM.

When the coordinator dies, the server stays and serves the next one. When this
task dies, it is started again with the same command: a worker is taken back by
the running job; a ps comes back empty, and the coordinator restores from the
last checkpoint.
"""

import contextlib
import dataclasses
import os
import signal
import time

from absl import logging

from pstrain import control as control_lib
from pstrain import errors, ports

# TensorFlow takes as many threads as there are cores. The reads of many workers
# wait at one ps, and messages need a thread too, on however small a machine.
_MIN_INTER_OP_THREADS = 16

# How long a server stays after it has said that it will leave: its reply, and
# the coordinator's goodbye to TensorFlow's own service, must get through.
_GRACE_SECS = 1.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        task: the `Task` it serves.
        address: str, `host:port` where it serves.
        control: its `Control`.
        tf_server: the `tf.distribute.Server`. It cannot be stopped, and must be
            kept for as long as it is to serve.
    """

    task: object
    address: str
    control: control_lib.Control
    tf_server: object


def serve(cluster, task):
    """Serves as `task` until the job is over: the whole life of a ps or worker.

    Must be called from the main thread, since it handles signals. The caller
    flushes its output and ends with `os._exit`: a process with a TensorFlow
    server in it may hang in a normal exit.

    Args:
        cluster: the `Cluster`; only the task's own address is used.
        task: the `Task` to be.

    Returns:
        The exit code: what the coordinator said, or 128 and the signal's number.

    Raises:
        JobError: if the task's port is taken.
    """
    control = control_lib.Control(task)
    with _leave_on_signals(control):
        server = start(cluster, task, control=control)
        logging.info("serve | %s at %s | pid %d", task, server.address, os.getpid())
        code, reason = control.wait()
        logging.info("serve | %s ends: %s | exit code %d", task, reason, code)
        time.sleep(_GRACE_SECS)
    return code


def start(cluster, task, control=None):
    """Starts the server of `task` and returns at once.

    For a process that does something besides: worker 0 that also coordinates.

    Args:
        cluster: the `Cluster`; only the task's own address is used.
        task: the `Task` to be.
        control: the `Control` that gets the coordinator's messages; None: a new
            one.

    Returns:
        A `Server`; keep it.

    Raises:
        JobError: if the task's port is taken.
    """
    address = cluster.address(task)
    ports.require_free(int(address.rpartition(":")[2]), task)
    threads = max(_MIN_INTER_OP_THREADS, os.cpu_count() or 1)
    return start_at(address, task, threads, control)


def start_at(address, task, inter_op_threads, control=None):
    """Starts a server at `address`; port 0 takes any free port.

    Args:
        address: str, `host:port`; the server listens on every interface.
        task: the `Task` to be.
        inter_op_threads: int, operations that may run (or wait) at once. All
            servers of a process share the threads of the first.
        control: the `Control` that gets the coordinator's messages; None: a new
            one.

    Returns:
        A `Server`; keep it.
    """
    import tensorflow as tf

    control = control or control_lib.Control(task)
    # Before the server starts: a coordinator may connect at once.
    control.listen()
    try:
        tf_server = tf.distribute.Server(
            tf.train.ClusterSpec({task.job: {task.index: address}}),
            job_name=task.job,
            task_index=task.index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(
                inter_op_parallelism_threads=inter_op_threads
            ),
        )
    except tf.errors.OpError as error:
        raise errors.JobError(
            f"{task} cannot serve at {address}: {error.message}; check its entry in "
            "the host lists"
        ) from error
    host = address.rpartition(":")[0]
    port = tf_server.target.rpartition(":")[2]
    return Server(task, f"{host}:{port}", control, tf_server)


@contextlib.contextmanager
def _leave_on_signals(control):
    """SIGINT and SIGTERM end the wait of `control`, with the shell's exit code."""

    def leave(signum, frame):
        control.leave(128 + signum, f"received {signal.Signals(signum).name}")

    before = {s: signal.signal(s, leave) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
