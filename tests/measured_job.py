"""A job of one large table that measures itself, run as processes of its own.

With the flags of a task it is that task, and the chief prints how much memory it
needed for tables of several sizes.  With --network it is a whole cluster within
one process, in a network namespace of its own, and prints the bytes of a step.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import socket
import struct
import sys
import time

from pstrain import control, errors, probe, server
from pstrain.cluster import Cluster, Task

BATCH = 64
STEPS = 50
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def trainer_for(cluster, rows, columns):
    """A trainer of a table that every batch names some 64 rows of."""
    import keras
    import numpy as np
    import tensorflow as tf

    from pstrain.trainer import Trainer

    def build():
        ids = keras.Input((1,), dtype="int64")
        table = keras.layers.Embedding(rows, columns, name="table")
        h = keras.layers.Flatten()(table(ids))
        model = keras.Model(ids, keras.layers.Dense(1)(h))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    def data(context):
        ids = np.random.default_rng(0).integers(0, rows, (STEPS * BATCH, 1))
        labels = np.zeros((STEPS * BATCH, 1), "float32")
        return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH).repeat()

    return Trainer(build, data, cluster, min_table_bytes=1, min_shard_bytes=1)


# ---- bytes of a step -------------------------------------------------------------


def start_loopback():
    """Switches on the one network device of a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control_socket:
        request = struct.pack("16sh14x", b"lo", _IFF_UP)
        fcntl.ioctl(control_socket, _SIOCSIFFLAGS, request)


def traffic():
    """Bytes and packets that have gone over the loopback device."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            received = numbers.split()
            return int(received[0]), int(received[1])
    raise RuntimeError("no loopback device")


def measure_network(sizes, columns):
    """Prints what a step sends for each table size."""
    from pstrain.local import LocalCluster

    start_loopback()
    for rows in sizes:
        with LocalCluster(num_ps=2, num_workers=1) as cluster:
            trainer = trainer_for(cluster, rows, columns)
            trainer.train(STEPS)
            before = traffic()
            trainer.train(2 * STEPS)
            sent = [b - a for a, b in zip(before, traffic(), strict=True)]
            report(rows=rows, bytes=sent[0] / STEPS, packets=sent[1] / STEPS)


# ---- memory of the coordinator ---------------------------------------------------


def memory(field):
    """VmRSS (now) or VmHWM (the most since `forget_peak`) of this process, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field}")


def forget_peak():
    """The peak counts from now on; where this is forbidden, from the start."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")


def coordinate(cluster, sizes, columns):
    """Prints by how much each table size makes this process grow."""
    probe.wait_for_tasks(cluster, timeout_secs=60)
    for rows in sizes:
        forget_peak()
        before, start = memory("VmRSS"), time.monotonic()
        trainer = trainer_for(cluster, rows, columns)
        placed_secs = time.monotonic() - start
        trainer.train(STEPS)
        start = time.monotonic()
        trainer.train(5 * STEPS)
        report(
            rows=rows,
            growth=memory("VmHWM") - before,
            placed_secs=placed_secs,
            step_ms=(time.monotonic() - start) * 1e3 / (4 * STEPS),
        )
    control.stop_servers(cluster, timeout_secs=5)
    return 0


def report(**values):
    print(json.dumps(values), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--columns", type=int)
    parser.add_argument("--network", action="store_true")
    for flag in ("job_name", "ps_hosts", "worker_hosts", "chief_host"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--task_index", type=int)
    options = parser.parse_args()
    if options.network:
        measure_network(options.sizes, options.columns)
        return 0
    cluster = Cluster.from_hosts(
        options.ps_hosts, options.worker_hosts, options.chief_host
    )
    try:
        if options.job_name == "chief":
            return coordinate(cluster, options.sizes, options.columns)
        return server.serve(cluster, Task(options.job_name, options.task_index))
    except errors.PstrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
