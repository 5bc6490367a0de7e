"""The user's own Keras optimizer, applied on the parameter servers.

A worker sends gradients; the ps that holds a block of a variable also holds the
block's slots (momentum, accumulators) and runs `update_step` there.  Nothing of
the optimizer is rewritten: its `update_step` runs inside a stateless scope that
maps the variable and its slots to tensors, either a whole flat buffer or the
touched rows of a table, and the results are written back on the same ps.

Rows of tables are updated lazily, as in `tf.keras`'s and TensorFlow's sparse
kernels: a row that no example of the step named is left alone, while Keras
locally would still move it by momentum or decay.  Optimizers without such terms
(SGD, Adagrad) give the same numbers.

Updates of several workers may interleave.  A model variable is written by adding
a difference, so no update is lost; of a slot the later write stays.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from pstrain import compat, table, wire
from pstrain.errors import UsageError
from pstrain.lookup import split_by_shard
from pstrain.parameters import ps_device
from pstrain.table import table_of
from pstrain.update import TouchedRows, UpdateScope, WholeBuffer

# Optimizers whose update of one element looks at nothing but that element, so
# that it may run on any slice of a variable and on many variables at once.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.Adagrad,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Adamax,
    keras.optimizers.Adadelta,
    keras.optimizers.Lion,
)


def check(optimizer):
    """Refuses an optimizer that cannot run in pieces.

    Raises:
        UsageError: naming the optimizer or its option.
    """
    name = type(optimizer).__name__
    kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
    if not isinstance(optimizer, ELEMENTWISE) or isinstance(
        optimizer, keras.optimizers.Nadam
    ):
        raise UsageError(
            "this optimizer cannot be applied in pieces on parameter servers; "
            f"received: {name}; use one of {kinds} or a subclass"
        )
    if optimizer.built:
        raise UsageError(
            "the optimizer has been built before pstrain could place its slots; "
            f"received: a built {name}; pass a new one to compile"
        )
    for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(optimizer, option):
            raise UsageError(
                f"{name}({option}=...) is not supported on parameter servers; "
                f"received: {getattr(optimizer, option)}; leave it out"
            )


def build_slots(optimizer, variables):
    """Creates the optimizer's slots: tables beside tables, mirrors beside mirrors.

    Args:
        optimizer: an unbuilt `keras.optimizers.Optimizer`.
        variables: list of `keras.Variable`, all that are trainable.

    Returns:
        Dict from `id(variable)` to its list of slot variables.
    """
    slots = {id(variable): [] for variable in variables}

    def add_slot(reference_variable, *args, **kwargs):
        scope = contextlib.nullcontext()
        if table_of(reference_variable) is not None:
            scope = table.creation_scope(min_table_bytes=0)
        with scope:
            slot = compat.add_slot(optimizer, reference_variable, *args, **kwargs)
        slots[id(reference_variable)].append(slot)
        return slot

    with compat.instance_attributes(optimizer, add_variable_from_reference=add_slot):
        optimizer.build(variables)
    expected = sum(map(len, slots.values()))
    shared = {id(compat.iterations_variable(optimizer))}
    shared.add(id(compat.learning_rate_variable(optimizer)))
    found = [v for v in optimizer.variables if id(v) not in shared]
    if len(found) != expected:
        raise UsageError(
            "the optimizer keeps variables that belong to no model variable; "
            f"received: {type(optimizer).__name__} with {len(found)} variables, of "
            f"which {expected} are slots; add slots by add_variable_from_reference"
        )
    return slots


def treatment(optimizer, variable):
    """A key that trained variables share if one update can serve them all."""
    alone = id(variable) if variable.constraint is not None else None
    return compat.decays(optimizer, variable), alone


class ServerOptimizer:
    """Applies gradients on the ps that hold the variables.

    Attributes:
        updates: `tf.Variable` int64 on ps 0, counts every update that was
            applied, also one that was repeated after a worker died.
    """

    def __init__(self, optimizer, parameters):
        """Binds an optimizer whose slots are built to placed parameters."""
        self._optimizer = optimizer
        self._parameters = parameters
        self._average = compat.moving_averages(optimizer)
        with tf.device(ps_device(0)):
            self.updates = tf.Variable(0, dtype=tf.int64, trainable=False)

    def learning_rate(self, step):
        """The learning rate of a step as the optimizer's schedule gives it."""
        with self._step_scope(step, None):
            return tf.cast(
                tf.convert_to_tensor(self._optimizer.learning_rate), "float32"
            )

    def apply(self, gradients, step, learning_rate):
        """Sends gradients to the ps and updates there; call inside a function.

        Args:
            gradients: dict from `id(variable)` to a tensor, or `tf.IndexedSlices`
                for a table.
            step: scalar int64, number of the step, from 0.
            learning_rate: scalar float32.

        Returns:
            List of operations on the ps, one or more a ps, that finish the update.
        """
        gradients = self._clip(self._merge_duplicates(gradients))
        rows = self._rows_by_device(gradients)
        done = []
        for ps in range(self._parameters.sharding.num_ps):
            done += self._apply_on(ps, gradients, rows, step, learning_rate)
        with tf.device(self.updates.device):
            done.append(self.updates.assign_add(1, read_value=False))
        return done

    def _merge_duplicates(self, gradients):
        """One gradient a row, and plain tensors for packed variables."""
        tables = {id(variable) for variable in self._parameters.tables}
        merged = {}
        for key, gradient in gradients.items():
            if key in tables:
                unique, positions = tf.unique(gradient.indices)
                values = tf.math.unsorted_segment_sum(
                    gradient.values, positions, tf.size(unique)
                )
                merged[key] = tf.IndexedSlices(values, unique, gradient.dense_shape)
            else:
                merged[key] = tf.convert_to_tensor(gradient)
        return merged

    def _clip(self, gradients):
        """Unscales and clips each original variable, as `Optimizer.apply` does."""
        optimizer = self._optimizer
        keys = list(gradients)
        # The norm of the touched rows is the norm of the whole gradient.
        values = [
            g.values if isinstance(g, tf.IndexedSlices) else g
            for g in gradients.values()
        ]
        if optimizer.loss_scale_factor is not None:
            values = [value / optimizer.loss_scale_factor for value in values]
        values = compat.clip_gradients(optimizer, values)
        clipped = {}
        for key, value in zip(keys, values, strict=True):
            rows = gradients[key]
            if isinstance(rows, tf.IndexedSlices):
                value = tf.IndexedSlices(value, rows.indices, rows.dense_shape)
            clipped[key] = value
        return clipped

    def _apply_on(self, ps, gradients, rows, step, learning_rate):
        """One message to one ps: step, learning rate, dense gradients, rows."""
        flats = [f for f in self._parameters.dense if f.ps == ps]
        rows = rows.get(ps_device(ps), [])
        if not flats and not rows:
            return []
        counts = [tf.size(local) for _, _, _, local, _ in rows]
        header = [step, learning_rate, *counts]
        body = [flat.join(gradients) for flat in flats]
        for _, _, _, local, values in rows:
            body += [local, values]
        message = wire.pack([*header, *body])
        with tf.device(ps_device(ps)):
            step, learning_rate, counts, rest = _open(message, len(rows))
            specs = [(flat.dtype, [flat.size]) for flat in flats]
            for (_, shard, _, local, values), n in zip(rows, counts, strict=True):
                specs += [(local.dtype, [n]), (values.dtype, [n, shard.shape[1]])]
            parts = wire.unpack(rest, specs)
            done = [
                op
                for flat, gradient in zip(flats, parts, strict=False)
                for op in self._update_flat(flat, gradient, step, learning_rate)
            ]
            for number, (variable, shard, slots, _, _) in enumerate(rows):
                local, values = parts[len(flats) + 2 * number :][:2]
                target = TouchedRows(variable, shard, slots, local)
                done += self._update(target, values, step, learning_rate)
        return done

    def _rows_by_device(self, gradients):
        """Sorts the row gradients of all tables by the ps that is to get them.

        Returns:
            Dict from device to a list of `(variable, shard, slots, rows, values)`,
            with the rows numbered within the shard.
        """
        by_device = {}
        for variable in self._parameters.tables:
            gradient = gradients.get(id(variable))
            if gradient is None:
                continue
            whole = table_of(variable)
            local, values = [gradient.indices], [gradient.values]
            if len(whole.shards) > 1:
                local, order = split_by_shard(whole, gradient.indices)
                values = [tf.gather(gradient.values, places) for places in order]
            for number, (shard, *rows) in enumerate(
                zip(whole.shards, local, values, strict=True)
            ):
                slots = [
                    (slot, table_of(slot).shards[number])
                    for slot in self._parameters.slots[id(variable)]
                ]
                by_device.setdefault(shard.device, []).append(
                    (variable, shard, slots, *rows)
                )
        return by_device

    def _update_flat(self, flat, gradient, step, learning_rate):
        # Members of a flat buffer are treated alike, so the first speaks for all.
        first = flat.pieces[0].variable
        slots = list(zip(self._parameters.slots[id(first)], flat.slots, strict=True))
        target = WholeBuffer(first, flat.buffer, slots, flat.pieces[0].shape)
        return self._update(target, gradient, step, learning_rate)

    def _update(self, target, gradient, step, learning_rate):
        """Runs `update_step` on tensors and writes the results back."""
        optimizer, variable = self._optimizer, target.variable
        values = [(variable, target.read(target.storage))]
        values += [(slot, target.read(storage)) for slot, storage in target.slots]
        old = values[0][1]
        with self._step_scope(step, learning_rate) as scope:
            scope.put_all(values)
            if compat.decays(optimizer, variable):
                rate = tf.cast(learning_rate, old.dtype)
                scope.add(variable, -old * optimizer.weight_decay * rate)
            optimizer.update_step(gradient, variable, learning_rate)
            self._update_average(scope, variable, step)
            if variable.constraint is not None:
                new = scope.get_current_value(variable)
                shaped = tf.reshape(new, target.constraint_shape)
                bounded = variable.constraint(shaped)
                scope.put(variable, tf.reshape(bounded, tf.shape(new)))
        done = []
        for slot, storage in target.slots:
            if scope.changed(slot):
                done.append(target.write(storage, scope.get_current_value(slot)))
        done.append(target.add(target.storage, scope.difference(variable)))
        return done

    def _update_average(self, scope, variable, step):
        """`use_ema`: the moving average of the weights, kept as a slot."""
        average = self._average.get(id(variable))
        if average is None:
            return
        momentum = tf.where(step > 0, self._optimizer.ema_momentum, 0.0)
        value = scope.get_current_value(variable)
        momentum = tf.cast(momentum, value.dtype)
        old = scope.get_current_value(average)
        scope.put(average, momentum * old + (1 - momentum) * value)

    @contextlib.contextmanager
    def _step_scope(self, step, learning_rate):
        """Optimizer variables as tensors, assignments recorded in the scope."""
        optimizer = self._optimizer
        scope = UpdateScope()
        scope.put(compat.iterations_variable(optimizer), step)
        rate = compat.learning_rate_variable(optimizer)
        if rate is not None and learning_rate is not None:
            scope.put(rate, tf.cast(learning_rate, rate.dtype))
        with (
            scope,
            compat.instance_attributes(
                optimizer,
                assign=lambda variable, value: scope.put(variable, value),
                assign_add=lambda variable, value: scope.add(variable, value),
                assign_sub=lambda variable, value: scope.add(variable, -value),
            ),
        ):
            yield scope


def _open(message, num_counts):
    """Header of an update message: step, learning rate, row counts, the rest."""
    size = 8 + 4 + 4 * num_counts
    specs = [(tf.int64, []), (tf.float32, [])] + [(tf.int32, [])] * num_counts
    step, learning_rate, *counts = wire.unpack(message[:size], specs)
    return step, learning_rate, counts, message[size:]


def acts_on_rows(constraint):
    """Whether a constraint treats every row alone, found by trying it."""
    sample = np.random.default_rng(0).normal(size=(6, 4)).astype("float32") * 3
    whole = np.asarray(constraint(tf.constant(sample)))
    halves = [np.asarray(constraint(tf.constant(part))) for part in np.split(sample, 2)]
    return np.allclose(whole, np.concatenate(halves), atol=1e-6)
