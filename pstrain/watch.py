"""Watching other tasks from outside of TensorFlow.

A call that waits for a ps that died or hangs may never return, and a server hears
nothing of a coordinator that died.  So neither relies on errors and messages alone:
a thread asks for the status of the other.  When a task has not answered several
times in a row, or another process answers in its place, and that is still so some
time later, who watches is told: the coordinator then ends, and so does a server.
"""

import threading

from pstrain import probe

EVERY_SECS = 2.0
STRIKES = 3
GRACE_SECS = 15.0


class Watch:
    """A thread that notices the loss of a task.

    Args:
        addresses: dict from a task's name to its `host:port`; all answer now.
        on_lost: callable of a phrase such as "ps 1 at host:port (connection
            refused)"; called once, `grace_secs` after the loss.
        grace_secs: float, from the loss to the call.
        every_secs: float, from one look to the next.
        strikes: int, looks without an answer that make a loss.
    """

    def __init__(
        self,
        addresses,
        on_lost,
        grace_secs=GRACE_SECS,
        every_secs=EVERY_SECS,
        strikes=STRIKES,
    ):
        self._addresses = addresses
        self._on_lost = on_lost
        self._grace_secs = grace_secs
        self._every_secs = every_secs
        self._strikes = strikes
        self._stopped = threading.Event()
        self._incarnations = {}

    def start(self):
        """Starts to watch; returns itself."""
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def stop(self):
        """Stops to watch; nobody is told any more."""
        self._stopped.set()

    def _run(self):
        missed = dict.fromkeys(self._addresses, 0)
        while not self._stopped.wait(self._every_secs):
            for name, address in self._addresses.items():
                missed[name] = missed[name] + 1 if self._look(name) else 0
                if missed[name] < self._strikes:
                    continue
                if self._stopped.wait(self._grace_secs):
                    return
                cause = self._look(name)
                if cause:
                    self._on_lost(f"{name} at {address} ({cause})")
                    return

    def _look(self, name):
        """Why the task that was there is not, or None."""
        try:
            status = probe.get_status(self._addresses[name])
        except probe.ProbeError as error:
            return str(error)
        first = self._incarnations.setdefault(name, status.incarnation)
        return None if first == status.incarnation else "it was started anew"
