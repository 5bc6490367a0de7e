"""A table: a large variable whose rows live on the parameter servers only.

While a model is built, every large rank-2 variable becomes a `Table` that has a
shape, a dtype and an initializer but no values, so that building costs nothing
on the coordinator.  Once it is known what the training step does with it
(`survey`) and which ps gets which rows (`plan`), `place` makes the shards, each
on its ps.  Inside a training step a table is only looked up (`lookup`); reading
it whole happens outside of steps, where a user asks for its values.

A ps that dies takes its shards with it; they come back from a checkpoint.
"""

import contextlib
import itertools

import numpy as np
import tensorflow as tf

from pstrain import compat, initial

# Smaller variables are cheaper to send whole than to look up.
MIN_TABLE_BYTES = 256 << 10

_numbers = itertools.count()


class Table:
    """What a `keras.Variable` holds instead of a `tf.Variable`.

    Attributes:
        shape: `tf.TensorShape` of rank 2: rows, columns.
        dtype: `tf.DType`.
        name: str, the path of the Keras variable.
        initializer: makes the initial value, see `initial.rows`.
        shards: list of `tf.Variable`, consecutive blocks of rows, each on its
            ps; empty before `place`.
        offsets: list of int, first row of every shard, then the number of rows.
    """

    def __init__(self, initializer, shape, dtype, name, trainable):
        """Describes a table; nothing is allocated."""
        self.initializer = initializer
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)
        self.name = name
        self.trainable = trainable
        self.shards = []
        self.offsets = []
        self._assigned = None
        self._unique_id = f"pstrain_table_{next(_numbers)}"

    @property
    def placed(self):
        """Whether the shards exist."""
        return bool(self.shards)

    @property
    def num_bytes(self):
        """Size of the whole table in bytes."""
        return self.shape.num_elements() * self.dtype.size

    def place(self, blocks):
        """Makes the shards with their initial values.

        Args:
            blocks: list of `(device, begin, end)`: rows `[begin, end)` live on
                `device`; consecutive, together all rows.
        """
        self.offsets = [begin for _, begin, _ in blocks] + [self.shape[0]]
        for device, begin, end in blocks:
            with tf.device(device):
                # The callable runs on the ps: no zeros cross the network.
                self.shards.append(
                    tf.Variable(
                        lambda n=end - begin: tf.zeros([n, self.shape[1]], self.dtype),
                        trainable=self.trainable,
                        name=f"{self.name}/part_{len(self.shards)}",
                    )
                )
            self._fill(self.shards[-1], begin, end)
        self._assigned = None

    def _fill(self, shard, begin, end):
        """Gives a shard its initial rows, a chunk at a time to bound memory."""
        row_bytes = self.shape[1] * self.dtype.size
        step = max(1, initial.CHUNK_BYTES // row_bytes)
        for first in range(begin, end, step):
            last = min(first + step, end)
            with tf.device(shard.device):
                if self._assigned is not None:
                    values = tf.convert_to_tensor(self._assigned[first:last])
                else:
                    shape = self.shape.as_list()
                    values = initial.rows(
                        self.initializer, shape, first, last, self.dtype
                    )
                _write_rows(shard, first - begin, values)

    def materialize(self):
        """The initial value as an ordinary local `tf.Variable`.

        For a large variable that turned out not to be looked up by rows.
        """
        return tf.Variable(self.numpy(), trainable=self.trainable, name=self.name)

    def read(self):
        """The whole value as one tensor of shape `shape`; sends every row."""
        if not self.placed:
            if self._assigned is not None:
                return tf.convert_to_tensor(self._assigned)
            shape = self.shape.as_list()
            return initial.rows(self.initializer, shape, 0, shape[0], self.dtype)
        parts = []
        for shard in self.shards:
            with tf.device(shard.device):
                parts.append(shard.read_value())
        return tf.concat(parts, 0)

    def numpy(self):
        """The whole value as a numpy array; reads every row from its ps."""
        return self.read().numpy()

    def __array__(self, dtype=None, copy=None):
        """Numpy conversion, for `get_weights` and saving."""
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype=None, name=None):
        """Tensor conversion outside of a training step: the whole table."""
        if not self.placed and not tf.executing_eagerly():
            return tf.zeros(self.shape, self.dtype)  # shape inference of a layer
        return self.read()

    def assign(self, value):
        """Replaces all rows; `value` has the shape of the table."""
        value = np.asarray(value, self.dtype.as_numpy_dtype)
        if not self.placed:
            self._assigned = value
            return
        for index, shard in enumerate(self.shards):
            block = value[self.offsets[index] : self.offsets[index + 1]]
            shard.assign(block)


def _write_rows(shard, row, values):
    """Writes `values` over the rows of `shard` from `row` on, in place."""
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=shard.handle,
        begin=[row],
        end=[row + int(values.shape[0])],
        strides=[1],
        value=values,
    )


@contextlib.contextmanager
def creation_scope(min_table_bytes=MIN_TABLE_BYTES):
    """Inside, large rank-2 Keras variables become tables; others stay local.

    Args:
        min_table_bytes: int, size from which a variable becomes a table.
    """

    def create(next_creator, **kwargs):
        made_by = compat.initializer_of(kwargs.get("initial_value"))
        if made_by is None:
            return next_creator(**kwargs)
        initializer, shape, path = made_by
        dtype = tf.as_dtype(kwargs.get("dtype") or tf.float32)
        if len(shape) != 2 or np.prod(shape) * dtype.size < min_table_bytes:
            return next_creator(**kwargs)
        return Table(initializer, shape, dtype, path, kwargs.get("trainable"))

    with tf.variable_creator_scope(create):
        yield


def table_of(variable):
    """The table that a `keras.Variable` holds, or None."""
    value = compat.backend_value(variable)
    return value if isinstance(value, Table) else None


def whole_value(variable):
    """A Keras variable of a trained model as a numpy array, tables included."""
    whole = table_of(variable)
    return whole.numpy() if whole is not None else variable.numpy()
