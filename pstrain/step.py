"""What a worker runs: a pack of training steps, or one step of evaluation.

The coordinator sends a worker the number of its first step and how many to do.
The worker reads the packed variables and the rows that its batch names, runs the
model's own `train_step` inside a `StepScope`, and sends gradients to the ps.
What must be exact stays inside the pack: metrics start from zero and return to
the coordinator as numbers, seeds are a function of the step number, statistics
of the forward pass are summed on their ps once a pack.

If the worker dies, the pack is run again elsewhere under the same step numbers:
its updates may be applied twice, the counts and the seeds are not.
"""

import keras
import numpy as np
import tensorflow as tf

from pstrain import compat
from pstrain.parameters import assemble
from pstrain.scope import StepScope
from pstrain.survey import GradientCollector


class StepFunctions:
    """The functions that are dispatched to workers.

    Attributes:
        train: `tf.function(iterator, control)`; `control` is float64
            `[first step, number of steps, learning rate]`.  Returns a float64
            vector: number of examples, then the changes of all metric variables.
    """

    def __init__(self, model, survey, parameters, optimizer):
        """Traces nothing yet.

        Args:
            model: the compiled `keras.Model` on the coordinator.
            survey: its `survey.Survey`.
            parameters: its placed `parameters.Parameters`.
            optimizer: its `optimizer.ServerOptimizer`.
        """
        self._model = model
        self._survey = survey
        self._parameters = parameters
        self._optimizer = optimizer
        self._seeds = [np.asarray(compat.backend_value(v)) for v in survey.seeds]
        model.reset_metrics()
        self._zero_metrics = [
            tf.constant(compat.backend_value(v).numpy()) for v in survey.metrics
        ]
        self.train = tf.function(self._train, autograph=False)
        self._evaluate_functions = {}

    def _train(self, iterator, control):
        first = tf.cast(control[0], tf.int64)
        last = first + tf.cast(control[1], tf.int64)
        learning_rate = tf.cast(control[2], tf.float32)
        state_before = self._read(self._parameters.state)
        frozen = self._read(self._parameters.frozen)

        def one_step(step, examples, state, metrics):
            batch = next(iterator)
            state = list(zip([v for v, _ in state_before], state, strict=True))
            scope, done = self._one_step(
                batch, step, learning_rate, frozen + state, metrics
            )
            new_state = [scope.state_mapping[id(v)] for v, _ in state]
            new_metrics = [scope.state_mapping[id(v)] for v in self._survey.metrics]
            # The next step of this worker reads what this one has written.
            with tf.control_dependencies(done):
                step = step + 1
            return step, examples + _batch_size(batch), new_state, new_metrics

        _, examples, state, metrics = tf.while_loop(
            lambda step, *_: step < last,
            one_step,
            [
                first,
                tf.constant(0, tf.int64),
                [value for _, value in state_before],
                self._zero_metrics,
            ],
            parallel_iterations=1,
        )
        changes = {
            id(variable): new - old
            for (variable, old), new in zip(state_before, state, strict=True)
        }
        with tf.control_dependencies(self._add_state(changes)):
            return self._report(examples, metrics)

    def _one_step(self, batch, step, learning_rate, fixed, metrics):
        """One `train_step`: returns its scope and the update operations."""
        model = self._model
        dense = self._read(self._parameters.dense)
        optimizer = model.optimizer
        rate_variable = compat.learning_rate_variable(optimizer)
        values = dense + fixed + self._seed_values(step)
        values += zip(self._survey.metrics, metrics, strict=True)
        values.append((compat.iterations_variable(optimizer), step))
        if rate_variable is None:
            learning_rate = self._optimizer.learning_rate(step)
        else:
            values.append((rate_variable, learning_rate))
        scope = StepScope(
            values, tables=self._parameters.tables, trained=[v for v, _ in dense]
        )
        collector = GradientCollector(model)
        with scope, compat.instance_attributes(optimizer, apply=collector.apply):
            model.train_step(batch)
        compat.clear_losses(model)
        done = self._optimizer.apply(collector.gradients, step, learning_rate)
        return scope, done

    def evaluate_function(self, element_spec):
        """The function of one evaluation step for batches of a structure.

        Args:
            element_spec: structure of `tf.TensorSpec` of one batch.

        Returns:
            `tf.function(batch, step)` that returns a vector like `train`.
        """
        key = repr(element_spec)
        if key not in self._evaluate_functions:
            signature = [element_spec, tf.TensorSpec([], tf.int64)]
            self._evaluate_functions[key] = tf.function(
                self._evaluate, input_signature=signature, autograph=False
            )
        return self._evaluate_functions[key]

    def _evaluate(self, batch, step):
        """One `test_step` on a batch that the coordinator sends."""
        fixed = self._read(
            self._parameters.dense + self._parameters.state + self._parameters.frozen
        )
        optimizer = self._model.optimizer
        values = fixed + self._seed_values(step)
        values += zip(self._survey.metrics, self._zero_metrics, strict=True)
        values.append((compat.iterations_variable(optimizer), step))
        scope = StepScope(values, tables=self._parameters.tables)
        with scope:
            self._model.test_step(batch)
        compat.clear_losses(self._model)
        metrics = [scope.state_mapping[id(v)] for v in self._survey.metrics]
        return self._report(_batch_size(batch), metrics)

    def _read(self, flats):
        """Packed variables as `(variable, tensor)`, one message for each buffer."""
        return assemble(flats, [flat.split(flat.read()) for flat in flats])

    def _add_state(self, changes):
        """Adds the changes of forward-pass state to its flat buffers."""
        done = []
        for flat in self._parameters.state:
            change = flat.join(changes)
            with tf.device(flat.device):
                done.append(flat.buffer.assign_add(change, read_value=False))
        return done

    def _seed_values(self, step):
        """Generator states as they would be locally after `step` steps."""
        values = []
        for variable, start in zip(self._survey.seeds, self._seeds, strict=True):
            draws = self._survey.draws[id(variable)]
            advance = tf.stack([tf.zeros_like(step), step * draws])
            values.append((variable, start + tf.cast(advance, start.dtype)))
        return values

    def seeds_after(self, step):
        """Seed states as they would be locally: list of `(variable, value)`."""
        values = []
        for variable, start in zip(self._survey.seeds, self._seeds, strict=True):
            advance = np.array([0, step * self._survey.draws[id(variable)]])
            values.append((variable, start + advance.astype(start.dtype)))
        return values

    def restore_seeds(self, step, values):
        """Takes over seed states that were saved at `step`; None leaves one alone."""
        for number, (variable, value) in enumerate(
            zip(self._survey.seeds, values, strict=True)
        ):
            if value is not None:
                advance = np.array([0, step * self._survey.draws[id(variable)]])
                self._seeds[number] = value - advance.astype(value.dtype)

    def _report(self, examples, metrics):
        """One vector for the coordinator: examples, changes of metric states."""
        parts = [tf.cast(tf.reshape(examples, [1]), tf.float64)]
        for new, old in zip(metrics, self._zero_metrics, strict=True):
            change = tf.cast(new, tf.float64) - tf.cast(old, tf.float64)
            parts.append(tf.reshape(change, [-1]))
        return tf.concat(parts, 0)


def control_vector(first_step, num_steps, learning_rate):
    """The argument of `StepFunctions.train`, exact for steps up to 2**53."""
    return tf.constant([first_step, num_steps, learning_rate], tf.float64)


def _batch_size(batch):
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.shape(tf.nest.flatten(x)[0], tf.int64)[0]
