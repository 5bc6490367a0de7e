"""The smallest job there is, one file for all tasks: counts steps on a ps.

Takes the flags that `python -m pstrain` takes for a cluster, and shows the ends
of servers without anything else of pstrain.
"""

import argparse
import os
import signal
import sys

from absl import logging

from pstrain import control, errors, probe, server
from pstrain.cluster import Cluster, Task


def coordinate(cluster, hung):
    """Counts ten steps; `hung` names a server to stop (SIGSTOP) before the end."""
    probe.wait_for_tasks(cluster, timeout_secs=120, every_secs=1)
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.as_dict()), task_type="chief", task_id=0
        )
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        steps = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step():
        steps.assign_add(1)

    for _ in range(10):
        coordinator.schedule(step)
    coordinator.join()
    print("steps", steps.numpy(), flush=True)
    for task in cluster.tasks():
        reply = control.call(task, "hello")
        if str(task) == hung:
            os.kill(reply["pid"], signal.SIGSTOP)
    silent = control.stop_servers(cluster, timeout_secs=3)
    print("silent", *silent, flush=True)
    # Here, while function and variable are still referenced: TensorFlow deletes
    # them on every server, and one that hangs would keep us for ever.
    end(0)


def end(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job_name")
    parser.add_argument("--task_index", type=int)
    parser.add_argument("--ps_hosts")
    parser.add_argument("--worker_hosts")
    parser.add_argument("--chief_host", default="")
    parser.add_argument("--hung")
    options = parser.parse_args()
    logging.set_verbosity(logging.INFO)
    cluster = Cluster.from_hosts(
        options.ps_hosts, options.worker_hosts, options.chief_host
    )
    try:
        if options.job_name == "chief":
            coordinate(cluster, options.hung)
        return server.serve(cluster, Task(options.job_name, options.task_index))
    except errors.PstrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    end(main())
