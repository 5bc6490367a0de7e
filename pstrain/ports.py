"""Which TCP ports are taken, and which are free.

A server that cannot have its port says so here, in a sentence with the port and
the task, before TensorFlow is asked (it would say "Could not start gRPC
server"). Clusters on one machine take their ports from `free_ports`.
"""

import contextlib
import random
import socket

from pstrain import errors

# Below the range from which Linux takes the ports of outgoing connections
# (32768 and up): there, a peer that keeps trying to reach a dead task could be
# given the task's own port, so that the task could not come back.
_CANDIDATES = range(20000, 30000)

# Not the shared generator: jobs that seed it alike would pick the same ports.
_random = random.SystemRandom()


def free_ports(count):
    """Finds `count` different TCP ports that nobody listens on.

    They are free now; somebody else can still take one before it is used.

    Args:
        count: int, how many.

    Returns:
        List of `count` ints.
    """
    with contextlib.ExitStack() as held:
        found = []
        for port in _random.sample(_CANDIDATES, len(_CANDIDATES)):
            if len(found) == count:
                return found
            with contextlib.suppress(OSError):
                # Held until all are found, or two callers would share one.
                held.enter_context(_listen(port))
                found.append(port)
    raise errors.JobError(
        f"there are not {count} free ports between {_CANDIDATES.start} and "
        f"{_CANDIDATES.stop}; found {len(found)}; stop other jobs on this machine"
    )


def require_free(port, task):
    """Raises a `JobError` that names port and task if somebody has the port."""
    try:
        _listen(port).close()
    except OSError as error:
        raise errors.JobError(
            f"port {port} is in use on this host or cannot be had "
            f"({error.strerror or error}); {task} was to serve there; end the "
            f"process that has it (maybe an earlier {task}) or give {task} "
            "another port in the host lists"
        ) from error


def _listen(port):
    """Listens on `port` as a gRPC server does: on every interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As gRPC does: connections of an earlier task that are still in
        # TIME_WAIT are no hindrance, a listening socket is.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
