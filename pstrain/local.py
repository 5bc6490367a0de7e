"""A whole cluster inside this process: real gRPC servers on loopback ports.

For `python -m pstrain` without flags, for notebooks and for tests. The servers
are the same as in OS processes and everything crosses the (loopback) network;
what cannot be had here is one of them dying.

TensorFlow servers cannot be stopped, so those of a process are started once and
used again: a `LocalCluster` takes as many as it needs and starts what is
missing. One after the other, clusters of any size work, each with a
`ParameterServerStrategy` of its own, also after a step of an earlier one failed
(TensorFlow 2.21). Two at a time do not: a process has one connection.
"""

import threading

from pstrain import errors, ports, server
from pstrain.cluster import Cluster, Task

# All servers of a process share the threads of the first; with too few, workers
# wait for each other and the job hangs without a word. At least four a worker;
# idle threads cost next to nothing.
_INTER_OP_THREADS = 128
_THREADS_PER_WORKER = 4
_MAX_WORKERS = _INTER_OP_THREADS // _THREADS_PER_WORKER

_in_use = threading.Lock()
_servers = {}
_last = None


class LocalCluster:
    """Parameter servers and workers inside this process, as a context manager.

    Example:

    ```python
    with pstrain.LocalCluster(num_ps=2, num_workers=2) as local:
        print(local.cluster.ps)
    ```

    Attributes:
        cluster: the `Cluster`, with this process as its chief; set on entry.

    Args:
        num_ps: int, how many parameter servers.
        num_workers: int, how many workers.
    """

    def __init__(self, num_ps=2, num_workers=2):
        if num_ps < 1 or not 1 <= num_workers <= _MAX_WORKERS:
            raise errors.UsageError(
                f"a local cluster has at least 1 ps, and 1 to {_MAX_WORKERS} workers; "
                f"received: num_ps={num_ps}, num_workers={num_workers}"
            )
        self.num_ps = num_ps
        self.num_workers = num_workers
        self.cluster = None

    def __enter__(self):
        """Starts the servers that are missing."""
        global _last
        if not _in_use.acquire(blocking=False):
            raise errors.UsageError(
                "a local cluster is in use in this process, and TensorFlow connects "
                "a process to one cluster at a time; leave the other one first"
            )
        try:
            ps = tuple(_address("ps", index) for index in range(self.num_ps))
            workers = tuple(
                _address("worker", index) for index in range(self.num_workers)
            )
            # TensorFlow opens a port for the coordinator when it connects. For
            # the same cluster again it keeps it; for another one it opens
            # another and cannot have the old one.
            if _last is None or (_last.ps, _last.workers) != (ps, workers):
                chief = f"127.0.0.1:{ports.free_ports(1)[0]}"
                _last = Cluster(ps=ps, workers=workers, chief=chief)
            self.cluster = _last
        except BaseException:
            _in_use.release()
            raise
        return self

    def __exit__(self, *exc_info):
        """Leaves the servers, idle, to the next cluster."""
        self.cluster = None
        _in_use.release()


def _address(job, index):
    """The address of a server of this process, started if need be."""
    task = Task(job, index)
    if task not in _servers:
        # Port 0: the system picks the port, so that nobody can take it between.
        _servers[task] = server.start_at("127.0.0.1:0", task, _INTER_OP_THREADS)
    return _servers[task].address
