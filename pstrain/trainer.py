"""The outer loop: a Keras model trained to a step on a cluster.

Inner and outer loop are apart: a worker runs packs of steps (`step`), and this
loop on the coordinator decides when to send the next pack and what happens at
the boundaries between them: a log line, a checkpoint, the end.  It counts steps
by the packs whose results have come back, so the global step is exact with any
number of workers.

If a worker dies, its pack is repeated elsewhere and the loop does not notice.
If a ps dies, the loop ends with an error after which the last checkpoint stands.
"""

import dataclasses
import os
import time

import keras
import numpy as np
import tensorflow as tf

from pstrain import blueprint, checkpoint, compat, coordinator, data, optimizer
from pstrain.errors import UsageError
from pstrain.metrics import MetricSums
from pstrain.parameters import Parameters
from pstrain.step import StepFunctions, control_vector

MIN_SHARD_BYTES = 256 << 10


class Trainer:
    """Trains one model on the parameter servers of one cluster.

    Example:

    ```python
    with pstrain.LocalCluster(num_ps=2, num_workers=2) as cluster:
        trainer = pstrain.Trainer(build_model, train_data, cluster)
        print(trainer.plan.text())
        print(trainer.train(last_step=1000))
        print(trainer.evaluate(eval_data()))
    ```

    Attributes:
        model: the `keras.Model`; its small variables are mirrors that `pull`
            brings up to date, its tables are read from the ps when asked for.
        plan: the `plan.Plan`: what lives on which ps.
        step: int, the global step, steps that have been completed.
        model_dir: str, absolute, or "" when nothing is saved.
    """

    def __init__(
        self,
        model,
        train_data,
        cluster,
        *,
        model_dir="",
        seed=0,
        steps_per_dispatch=10,
        min_shard_bytes=MIN_SHARD_BYTES,
        max_shards=None,
        min_table_bytes=None,
        phase=lambda text: None,
        connected=None,
    ):
        """Builds the model, places it, and restores the last checkpoint.

        Args:
            model: callable without arguments that builds and compiles a
                `keras.Model`; called once.
            train_data: callable of `InputContext` that returns a batched
                `tf.data.Dataset`, usually one that repeats; called once a worker.
            cluster: `Cluster`, or anything with such an attribute `cluster`; its
                tasks must be up.
            model_dir: str, directory of checkpoints that the coordinator and all
                ps share; "" to keep none.
            seed: int, seeds initial values, dropout and, by `InputContext`, data.
            steps_per_dispatch: int, steps that a worker does in one call.
            min_shard_bytes: int, smallest piece into which a variable is cut.
            max_shards: int, most pieces of a variable; None for one a ps.
            min_table_bytes: int, smallest variable that is looked up by rows
                instead of being read whole; None for 256 KiB.
            phase: callable of str, told before each slow phase.
            connected: `tf.distribute.coordinator.ClusterCoordinator`, if there is
                one for the cluster already; None to connect.

        Raises:
            UsageError: the model, the data or the checkpoint does not fit.
        """
        cluster = getattr(cluster, "cluster", cluster)
        self.step = 0
        self.model_dir = checkpoint.absolute(model_dir) if model_dir else ""
        self._steps_per_dispatch = steps_per_dispatch
        self._stop_requested = False
        self._phase = phase

        keras.utils.set_random_seed(seed)
        num_ps, num_workers = len(cluster.ps), len(cluster.workers)
        partitioner = coordinator.size_partitioner(
            min_shard_bytes, max_shards or num_ps
        )
        if connected is None:
            phase("connecting to the cluster")
            connected = coordinator.connect(cluster, partitioner)
        self._coordinator = connected
        phase("building the model")
        inputs, spec = data.dataset_functions(train_data, num_workers, seed)
        plans = blueprint.make(model, spec, num_ps, partitioner, min_table_bytes)
        self.model, self.plan = plans.model, plans.plan
        phase("placing the variables on the ps")
        self._place(plans)
        phase("opening the input on the workers")
        self._iterator = compat.per_worker_iterators(self._coordinator, inputs)
        self._dispatcher = coordinator.Dispatcher(self._coordinator, num_workers)
        self._restore()

    def _place(self, plans):
        keras_optimizer = self.model.optimizer
        self._parameters = Parameters(
            plans.survey,
            plans.plan,
            plans.paths,
            plans.slots,
            lambda variable: optimizer.treatment(keras_optimizer, variable),
        )
        self._applied = optimizer.ServerOptimizer(keras_optimizer, self._parameters)
        self._functions = StepFunctions(
            self.model, plans.survey, self._parameters, self._applied
        )
        self._survey = plans.survey
        self._parts = checkpoint.parts_of(self._parameters, plans.paths)
        self._sums = MetricSums(self.model, plans.survey.metrics)

    # ---- training --------------------------------------------------------------

    def train(self, last_step, *, save_steps=None, log_steps=100, on_interval=None):
        """Trains until the global step is `last_step`.

        Args:
            last_step: int, the global step to end at, exactly.
            save_steps: int, a checkpoint every so many steps and at the end; None
                for the end only.  Nothing is saved without a `model_dir`.
            log_steps: int, steps of an interval.
            on_interval: callable of `Interval`, after every interval.

        Returns:
            Dict from metric name to float over the last interval; empty if there
            was nothing left to do.

        Raises:
            Whatever a step raised on its worker; the state before is saved.
        """
        clock = _Intervals(self, self._sums, log_steps, on_interval)
        try:
            while self.step < last_step and not self._stop_requested:
                until = _next_multiple(self.step, save_steps, last_step)
                self._train_until(until, log_steps, clock)
                if self.model_dir:
                    self.save()
        except BaseException:
            self._dispatcher.abandon()
            self._save_what_is_left()
            raise
        self.pull()
        return clock.finish()

    def _train_until(self, until, log_steps, clock):
        """Sends packs up to a step and takes their results, in order."""
        sent = self.step
        while self._dispatcher.in_flight or (sent < until and not self._stop_requested):
            stop_sending = sent >= until or self._stop_requested
            if not stop_sending and not self._dispatcher.full:
                end = _next_multiple(sent, log_steps, until)
                count = min(self._steps_per_dispatch, end - sent)
                control = control_vector(sent, count, self._learning_rate())
                self._dispatcher.send(
                    self._functions.train, (self._iterator, control), count
                )
                sent += count
                continue
            count, result = self._dispatcher.take()
            self.step += count
            self._sums.add(result)
            clock.tick()

    def applied_updates(self):
        """Updates that reached the ps: the steps, and those that were repeated."""
        return int(self._applied.updates.numpy())

    def stop(self):
        """Ends `train` after the packs that are in flight; safe in a signal handler."""
        self._stop_requested = True

    def _learning_rate(self):
        """The learning rate to send along; 0 when a schedule gives it there."""
        variable = compat.learning_rate_variable(self.model.optimizer)
        return 0.0 if variable is None else float(variable.numpy())

    def learning_rate(self):
        """The learning rate at the present step, as a float."""
        compat.iterations_variable(self.model.optimizer).assign(self.step)
        return float(np.asarray(self.model.optimizer.learning_rate))

    # ---- looking at the model ------------------------------------------------------

    def pull(self):
        """Brings the model's own variables up to date with the ps.

        After it, `model.get_weights()`, `model.predict` and the like see the
        trained values.  Optimizer slots are left on the ps.
        """
        self._parameters.pull()
        compat.iterations_variable(self.model.optimizer).assign(self.step)
        for variable, value in self._functions.seeds_after(self.step):
            variable.assign(value)

    def evaluate(self, dataset):
        """Loss and metrics of a finite dataset, each example once.

        The coordinator reads the dataset and sends its batches to the workers; a
        batch whose worker dies is sent to another one.

        Args:
            dataset: batched, finite `tf.data.Dataset`.

        Returns:
            Dict from metric name to float.
        """
        function = self._functions.evaluate_function(dataset.element_spec)
        sums = MetricSums(self.model, self._survey.metrics)
        step = tf.constant(self.step, tf.int64)
        for batch in dataset:
            while self._dispatcher.full:
                sums.add(self._dispatcher.take()[1])
            self._dispatcher.send(function, (batch, step), None)
        while self._dispatcher.in_flight:
            sums.add(self._dispatcher.take()[1])
        if not sums.examples:
            raise UsageError("the evaluation data is empty; received: 0 examples")
        return sums.results()

    # ---- checkpoints -----------------------------------------------------------------

    def save(self):
        """Writes a checkpoint of the present step into `model_dir`.

        Returns:
            Its path.
        """
        tf.io.gfile.makedirs(self.model_dir)
        local = {f"seeds/{i}": v for i, v in self._seeds().items()}
        rate = compat.learning_rate_variable(self.model.optimizer)
        if rate is not None:
            local[checkpoint.LEARNING_RATE] = rate.numpy()
        return checkpoint.save(self.model_dir, self.step, self._parts, local)

    def _seeds(self):
        return {
            number: value
            for number, (_, value) in enumerate(self._functions.seeds_after(self.step))
        }

    def _save_what_is_left(self):
        """After an error: saves if the ps still answer, and says nothing if not."""
        if not self.model_dir or checkpoint.latest(self.model_dir) == self._path():
            return
        try:
            self.save()
        except Exception:  # noqa: BLE001 - the first error is the one to show
            return

    def _path(self):
        return os.path.join(self.model_dir, f"ckpt-{self.step}")

    def _restore(self):
        path = checkpoint.latest(self.model_dir) if self.model_dir else None
        if path is None:
            return
        self._phase(f"restoring {path}")
        step = checkpoint.read_step(path)
        keys = [checkpoint.LEARNING_RATE, *(f"seeds/{i}" for i in self._seeds())]
        local = checkpoint.restore(path, self._parts, keys)
        self.step = step
        rate = compat.learning_rate_variable(self.model.optimizer)
        if rate is not None and checkpoint.LEARNING_RATE in local:
            rate.assign(local[checkpoint.LEARNING_RATE])
        self._functions.restore_seeds(
            step, [local.get(f"seeds/{i}") for i in self._seeds()]
        )
        self.pull()


@dataclasses.dataclass(frozen=True)
class Interval:
    """What an `on_interval` callable is told.

    Attributes:
        step: int, the global step at the end of the interval.
        steps: int, steps of the interval.
        examples: int, examples of the interval.
        seconds: float, time it took.
        metrics: dict from name to float, over the interval.
        learning_rate: float at its end.
    """

    step: int
    steps: int
    examples: int
    seconds: float
    metrics: dict
    learning_rate: float


class _Intervals:
    """Cuts a training into intervals and reports each."""

    def __init__(self, trainer, sums, log_steps, on_interval):
        self._trainer = trainer
        self._sums = sums
        self._log_steps = log_steps
        self._on_interval = on_interval
        self._start = trainer.step
        self._time = time.monotonic()
        self._metrics = {}
        sums.reset()

    def tick(self):
        if self._trainer.step % self._log_steps == 0:
            self._report()

    def finish(self):
        if self._trainer.step > self._start:
            self._report()
        return self._metrics

    def _report(self):
        trainer, now = self._trainer, time.monotonic()
        self._metrics = self._sums.results()
        interval = Interval(
            step=trainer.step,
            steps=trainer.step - self._start,
            examples=self._sums.examples,
            seconds=now - self._time,
            metrics=self._metrics,
            learning_rate=trainer.learning_rate(),
        )
        if self._on_interval is not None:
            self._on_interval(interval)
        self._sums.reset()
        self._start, self._time = trainer.step, now


def _next_multiple(step, every, limit):
    """The next multiple of `every` after `step`, at most `limit`."""
    return min(limit, (step // every + 1) * every) if every else limit
