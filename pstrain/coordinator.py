"""Connecting to a cluster and dispatching work to its workers.

`connect` gives TensorFlow's `ParameterServerStrategy` and `ClusterCoordinator`;
it is called once all tasks have answered, since the strategy would wait for a
missing one without a word.  `Dispatcher` keeps a bounded number of packs of steps
in flight, so that stopping is prompt and an error is seen early.

A worker that dies loses only the pack it was running, which TensorFlow gives to
another worker.
"""

import collections

import tensorflow as tf

from pstrain.errors import UsageError

# Packs in flight for each worker: one running, and enough waiting that a worker
# does not idle while the coordinator looks at another one's result.
PACKS_PER_WORKER = 3


def connect(cluster, partitioner=None):
    """Connects this process to the tasks of a cluster.

    Args:
        cluster: `cluster.Cluster` whose ps and workers answer.
        partitioner: for variables that a user creates in the strategy's scope.

    Returns:
        A `tf.distribute.coordinator.ClusterCoordinator`.
    """
    if not cluster.ps or not cluster.workers:
        raise UsageError(
            "training needs at least one ps and one worker; received: "
            f"{len(cluster.ps)} ps, {len(cluster.workers)} workers"
        )
    spec = {
        job: hosts for job, hosts in cluster.as_dict().items() if job != "evaluator"
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(
        resolver, variable_partitioner=partitioner
    )
    return tf.distribute.coordinator.ClusterCoordinator(strategy)


def size_partitioner(min_shard_bytes, max_shards):
    """Cuts variables into at most `max_shards` pieces of at least this size."""
    return tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=min_shard_bytes, max_shards=max_shards
    )


class Dispatcher:
    """Sends packs of work to workers and returns their results in order.

    Attributes:
        in_flight: int, packs that were sent and whose result was not taken yet.
    """

    def __init__(self, coordinator, num_workers):
        """Takes the coordinator and the number of workers to keep busy."""
        self._coordinator = coordinator
        self._window = PACKS_PER_WORKER * num_workers
        self._pending = collections.deque()

    @property
    def in_flight(self):
        """Packs whose result has not been taken."""
        return len(self._pending)

    @property
    def full(self):
        """Whether the window is used up."""
        return self.in_flight >= self._window

    def send(self, function, args, label):
        """Schedules one call; `label` comes back with its result."""
        remote = self._coordinator.schedule(function, args=args)
        self._pending.append((label, remote))

    def take(self):
        """Waits for the oldest call.

        Returns:
            `(label, result)`, the result as numpy.

        Raises:
            Whatever the call raised on its worker.
        """
        label, remote = self._pending.popleft()
        return label, remote.fetch()

    def abandon(self):
        """Forgets what is in flight, after an error."""
        self._pending.clear()
