"""How the coordinator tells a server something: hello, or that the job is over.

A TensorFlow server has no way to be told to stop. But an operation that the
coordinator places on the server's device may be a `PyFunc`, which calls a
Python function of the server's process by its token; so each server registers
one function, and messages travel on TensorFlow's own port, also while long
steps run. A message is a JSON object `{"command": ..., "task": ...}`, the reply
another; nothing that arrives is run as code.

```
coordinator: call(task, "exit", code=0) ──► server: _answer ─► Control.handle
             ◄── {"task": "ps 0", "pid": 17} ──┘            └─► Control.wait returns
```

When a server is dead or hangs, `call` raises after its deadline, and
`stop_servers` goes on with the others. When the coordinator dies, no message
comes and the servers stay, ready for its successor.
"""

import contextlib
import json
import os
import queue
import threading
import time

from pstrain import errors, watch

_TOKEN = "pstrain_control"
_MAX_REASON_CHARS = 500
_SIGNAL_POLL_SECS = 0.5
_STOP_ROUNDS = 3
_STOP_PAUSE_SECS = 0.5

# A server whose coordinator is gone for so long leaves, with this exit code. Until
# then a coordinator that was started again finds it.
ORPHAN_TIMEOUT_SECS = 30.0
ORPHANED = 3

# The tasks that this process serves: one, or all of an in-process cluster.
_controls = {}


# PRIVATE TensorFlow ---------------------------------------------------------
# Seen in TensorFlow 2.21: tf.py_function and tf.numpy_function draw a token
# for the function and register it in `script_ops._py_funcs`; there is no public
# way to choose the token, and the coordinator could not know a drawn one.


def register_remote_function(token, fn):
    """Lets `tf.raw_ops.PyFunc(token=token)` call `fn` in this process.

    Args:
        token: str, the name that the caller uses.
        fn: function of bytes that returns bytes. The registry holds it weakly,
            so it must be kept alive elsewhere (a module's function is).
    """
    from tensorflow.python.ops import script_ops

    registry = getattr(script_ops, "_py_funcs", None)
    functions = getattr(registry, "_funcs", None)
    if functions is None:
        raise errors.PstrainError(
            "this TensorFlow has no script_ops._py_funcs._funcs, through which "
            "servers are told to stop; install TensorFlow 2.21"
        )
    functions[token] = fn


# ----------------------------------------------------------------------------


class Control:
    """The server's end: answers messages, and waits for the one to leave.

    Args:
        task: the `Task` that is served.
    """

    def __init__(self, task):
        self.task = task
        # Not an Event: a signal handler that sets an Event while the main
        # thread is about to wait for it can block for ever. A SimpleQueue is
        # made for that. The first entry counts.
        self._exits = queue.SimpleQueue()
        self._watch = None

    def listen(self):
        """Receives the messages for this task from now on."""
        _controls[str(self.task)] = self
        register_remote_function(_TOKEN, _answer)

    def leave(self, code, reason):
        """Makes `wait` return; may be called from a signal handler."""
        self._exits.put((code, reason))

    def wait(self):
        """Waits until the server is to leave.

        Returns:
            (exit code, the reason in a sentence).
        """
        while True:
            # Not without a timeout: Python handles a signal when the main thread
            # next runs, and one that comes just before it blocks does not wake it.
            with contextlib.suppress(queue.Empty):
                return self._exits.get(timeout=_SIGNAL_POLL_SECS)

    def handle(self, message):
        """Answers one message.

        Args:
            message: dict with `command`, and what the command needs.

        Returns:
            A dict: who answers, or `{"error": ...}`.
        """
        identity = {"task": str(self.task), "pid": os.getpid()}
        match message:
            case {"command": "hello", "coordinator": str(address)}:
                self._watch_coordinator(address)
                return identity
            case {"command": "hello"}:
                return identity
            case {"command": "exit", "code": int(code), "reason": str(reason)} if (
                0 <= code <= 255
            ):
                self.leave(code, " ".join(reason[:_MAX_REASON_CHARS].split()))
                return identity
        return {"error": f"{self.task} does not understand {str(message)[:200]}"}

    def _watch_coordinator(self, address):
        """Leaves when the coordinator is gone; a new one takes the place of an old."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = watch.Watch(
            {"the coordinator": address},
            lambda lost: self.leave(ORPHANED, f"lost {lost}"),
            grace_secs=ORPHAN_TIMEOUT_SECS,
        ).start()


def _answer(request):
    """What `PyFunc` calls on a server: JSON bytes in, JSON bytes out."""
    try:
        message = json.loads(request)
        name = message["task"]
        # A coordinator that renumbered its workers knows this one by another
        # name. With one task in the process there is no doubt who is meant.
        control = _controls.get(name)
        if control is None and len(_controls) == 1:
            (control,) = _controls.values()
        if control is None:
            raise ValueError(f"no task {name!r} here, only {sorted(_controls)}")
        reply = control.handle(message)
    except Exception as error:  # Whatever it is, the sender must learn of it.
        reply = {"error": f"message not understood: {error!r}"}
    return json.dumps(reply).encode()


def call(task, command, timeout_secs=10.0, **fields):
    """Sends one message to a server; the strategy must be connected.

    Args:
        task: the `Task` to tell, as numbered in the coordinator's cluster.
        command: str, "hello" or "exit".
        timeout_secs: float, how long to wait for the answer.
        **fields: what the command needs; `exit` needs `code` and `reason`.

    Returns:
        The reply, a dict with `task` and `pid`.

    Raises:
        JobError: if the server does not answer in time, or refuses.
    """
    reply = _call_all([task], {"command": command, **fields}, timeout_secs)[task]
    if "error" in reply:
        raise errors.JobError(f"{task}: {reply['error']}")
    return reply


def greet(tasks, address):
    """Tells servers where their coordinator is, so that they notice its end.

    Args:
        tasks: iterable of `Task`.
        address: str, `host:port` of the coordinator.
    """
    message = {"command": "hello", "coordinator": address}
    _call_all(list(tasks), message, timeout_secs=10.0)


def stop_servers(
    cluster, tasks=None, code=0, reason="the job is over", timeout_secs=10.0
):
    """Tells servers to exit, all at once; each leaves about a second later.

    Args:
        cluster: the `Cluster`.
        tasks: iterable of the `Task`s to tell; None: every ps and worker.
        code: int, the exit code that their processes end with.
        reason: str, the sentence that they log.
        timeout_secs: float, how long to wait for the answers of all.

    Returns:
        List of the `Task`s that did not answer.
    """
    tasks = list(cluster.tasks() if tasks is None else tasks)
    message = {"command": "exit", "code": code, "reason": reason}
    # Just after one task died, a call to another may still get the dead one's
    # error; a task that is there answers the next time.
    for _ in range(_STOP_ROUNDS):
        replies = _call_all(tasks, message, timeout_secs)
        tasks = [task for task in tasks if "error" in replies[task]]
        if not tasks:
            break
        time.sleep(_STOP_PAUSE_SECS)
    return tasks


def _call_all(tasks, message, timeout_secs):
    """Sends `message` to all tasks at the same time; a dict of their replies."""
    # Threads that nobody waits for: a call to a host that hangs cannot be
    # ended, and must not keep this process from ending.
    replies = {}
    threads = [
        threading.Thread(
            target=lambda task=task: replies.update({task: _call_now(task, message)}),
            daemon=True,
        )
        for task in tasks
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_secs
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silence = {"error": f"no answer within {timeout_secs:g} s"}
    return {task: replies.get(task, silence) for task in tasks}


def _call_now(task, message):
    """One call, for as long as it takes; the reply, or an error reply."""
    import tensorflow as tf

    device = f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0"
    try:
        # Every step that may wait for the server is an operation, since those
        # release the interpreter lock. Making a constant there, or numpy() of
        # a tensor there, keeps it, and a host that hangs would stop all
        # threads (TensorFlow 2.21).
        request = tf.constant(json.dumps({**message, "task": str(task)}))
        with tf.device(device):
            (reply,) = tf.raw_ops.PyFunc(
                input=[request], token=_TOKEN, Tout=[tf.string]
            )
        with tf.device(request.device):
            reply = tf.identity(reply)
        return json.loads(reply.numpy())
    except Exception as error:  # Dead, or no server of pstrain: all one to us.
        return {"error": str(error).partition("\n")[0] or repr(error)}
