"""Watching the parameter servers from outside of TensorFlow.

A call that waits for a ps that died or hangs may never return, so the coordinator
does not rely on errors alone: a thread asks every ps for its status.  When one has
not answered several times in a row, or another process answers in its place, the
coordinator gets some time to end by its own error; then it is ended.
"""

import threading

from pstrain import probe

EVERY_SECS = 2.0
STRIKES = 3
GRACE_SECS = 15.0


class Watch:
    """A thread that notices the loss of a ps; a context manager.

    Args:
        cluster: `cluster.Cluster` whose ps answer.
        on_lost: callable of a sentence fragment such as "ps 1 at host:port
            (connection refused)"; called once, `grace_secs` after the loss,
            unless the context has been left by then.
        every_secs: float, from one look to the next.
        strikes: int, looks without an answer that make a loss.
        grace_secs: float.
    """

    def __init__(
        self,
        cluster,
        on_lost,
        every_secs=EVERY_SECS,
        strikes=STRIKES,
        grace_secs=GRACE_SECS,
    ):
        self._tasks = [task for task in cluster.tasks() if task.job == "ps"]
        self._cluster = cluster
        self._on_lost = on_lost
        self._every_secs = every_secs
        self._strikes = strikes
        self._grace_secs = grace_secs
        self._left = threading.Event()
        self._incarnations = {}

    def __enter__(self):
        """Starts to watch."""
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *exc_info):
        """Stops to watch."""
        self._left.set()

    def _run(self):
        missed = dict.fromkeys(self._tasks, 0)
        while not self._left.wait(self._every_secs):
            for task in self._tasks:
                cause = self._look(task)
                missed[task] = missed[task] + 1 if cause else 0
                if missed[task] >= self._strikes:
                    if not self._left.wait(self._grace_secs):
                        address = self._cluster.address(task)
                        self._on_lost(f"{task} at {address} ({cause})")
                    return

    def _look(self, task):
        """Why the task that was there is not, or None."""
        try:
            status = probe.get_status(self._cluster.address(task))
        except probe.ProbeError as error:
            return str(error)
        first = self._incarnations.setdefault(task, status.incarnation)
        return None if first == status.incarnation else "it was started anew"
