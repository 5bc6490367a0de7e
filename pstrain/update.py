"""What one run of an optimizer's `update_step` reads and writes on a ps.

`UpdateScope` lets the update run on tensors and keeps what it changed;
`WholeBuffer` and `TouchedRows` are the two places where values come from and go
back to: a packed buffer with its slots, or some rows of a table's shard with the
same rows of its slots.
"""

import keras
import tensorflow as tf
from keras import StatelessScope


class UpdateScope(StatelessScope):
    """A stateless scope that accepts slices of variables and keeps differences."""

    def __init__(self):
        super().__init__(initialize_variables=False)
        self._old = {}
        self._difference = {}

    def put_all(self, values):
        """Sets the values that the update starts from: `(variable, tensor)`."""
        for variable, value in values:
            self._old[id(variable)] = value
            self._difference[id(variable)] = 0
            self.state_mapping[id(variable)] = value

    def put(self, variable, value):
        """Replaces the value of a variable."""
        value = _tensor(value)
        if id(variable) in self._old:
            value = tf.cast(value, self._old[id(variable)].dtype)
        self.state_mapping[id(variable)] = value
        self._difference[id(variable)] = None  # no longer a sum of differences

    def add(self, variable, value):
        """Adds to the value of a variable."""
        old = self.state_mapping[id(variable)]
        value = tf.cast(_tensor(value), old.dtype)
        self.state_mapping[id(variable)] = old + value
        if self._difference[id(variable)] is not None:
            self._difference[id(variable)] += value

    def changed(self, variable):
        """Whether the update gave the variable a new value."""
        return self.state_mapping[id(variable)] is not self._old[id(variable)]

    def difference(self, variable):
        """New minus old value; without rounding if it was a sum of differences."""
        difference = self._difference[id(variable)]
        if difference is None:
            return self.state_mapping[id(variable)] - self._old[id(variable)]
        return difference


def _tensor(value):
    return value.value if isinstance(value, keras.Variable) else value


class WholeBuffer:
    """A flat buffer and its slots as the target of an update."""

    def __init__(self, variable, storage, slots, shape):
        self.variable = variable
        self.storage = storage
        self.slots = slots
        self.constraint_shape = shape

    def read(self, storage):
        """The whole buffer."""
        return storage.read_value()

    def write(self, storage, value):
        """Replaces the buffer; returns the operation."""
        return storage.assign(value, read_value=False)

    def add(self, storage, difference):
        """Adds to the buffer, atomically; returns the operation."""
        return storage.assign_add(difference, read_value=False)


class TouchedRows:
    """The touched rows of a shard and of its slots as the target of an update."""

    def __init__(self, variable, storage, slots, rows):
        self.variable = variable
        self.storage = storage
        self.slots = slots
        self.constraint_shape = [-1, storage.shape[1]]
        self._rows = rows

    def read(self, storage):
        """The touched rows, in the order of the gradient."""
        return tf.ensure_shape(
            storage.sparse_read(self._rows), [None, storage.shape[1]]
        )

    def write(self, storage, value):
        """Replaces the touched rows; returns the operation."""
        return tf.raw_ops.ResourceScatterUpdate(
            resource=storage.handle, indices=self._rows, updates=value
        )

    def add(self, storage, difference):
        """Adds to the touched rows, atomically; returns the operation."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=storage.handle, indices=self._rows, updates=difference
        )
