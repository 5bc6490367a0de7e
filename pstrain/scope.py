"""One scope in which a Keras model runs on tensors instead of variables.

A worker must not read or write a Keras variable: it would cross the network one
variable at a time, and race with the other workers.  So the user's own
`train_step` runs inside a `keras.StatelessScope` that maps every variable of the
model, its metrics and its optimizer to a tensor read beforehand, and collects
what the step would have assigned.

`StepScope` adds two things to Keras's scope: gradient tapes see the tensors as
the variables they stand for, and tables can be looked up but not read whole.
"""

import tensorflow as tf
from keras import StatelessScope

from pstrain import compat, lookup
from pstrain.errors import UsageError
from pstrain.table import table_of


class StepScope(StatelessScope):
    """Runs one training or evaluation step of a model on tensors.

    Attributes:
        assigned: dict from `id(variable)` to how often the step assigned it.
    """

    def __init__(self, values, tables=(), trained=()):
        """Maps variables to values.

        Args:
            values: list of `(keras.Variable, tensor)`.
            tables: `keras.Variable`s that hold a `Table`.
            trained: those of `values` that gradients are taken of.
        """
        super().__init__(values, collect_losses=True, initialize_variables=False)
        self.assigned = {}
        self._initial = dict(self.state_mapping)
        self._leaves = {id(v): compat.Leaf(self.state_mapping[id(v)]) for v in trained}
        self._tables = {id(v): v for v in tables}
        for variable in tables:
            # A scalar stands for the table: gradients come back as row slices.
            anchor = tf.zeros([], table_of(variable).dtype)
            self._leaves[id(variable)] = compat.Leaf(anchor)

    def get_current_value(self, variable):
        """The tensor that stands for `variable` in this step."""
        leaf = self._leaves.get(id(variable))
        if leaf is not None:
            leaf.notify_tapes()
        if id(variable) in self._tables:
            return _TableValue(variable, leaf.handle, self)
        value = super().get_current_value(variable)
        return self.unknown(variable) if value is None else value

    def add_update(self, update):
        """Records an assignment that the step makes to a variable."""
        variable, _ = update
        self.assigned[id(variable)] = self.assigned.get(id(variable), 0) + 1
        super().add_update(update)

    def unknown(self, variable):
        """A variable that belongs neither to the model nor to its metrics."""
        raise UsageError(
            "the training step uses a variable that the model does not track, so "
            f"it would not be trained or saved; received: {variable.path}; make it "
            "an attribute of the model or of one of its layers"
        )

    def change(self, variable):
        """New minus old value of an assigned variable, as a tensor."""
        return self.state_mapping[id(variable)] - self._initial[id(variable)]

    def lookup(self, variable, ids):
        """Rows of a table for `ids`, differentiable; shape of ids plus columns."""
        table = table_of(variable)
        unique, positions = lookup.distinct(lookup.row_ids(ids, table))
        rows = tf.stop_gradient(self.fetch_rows(variable, unique))
        values = self.expand(variable, rows, unique, positions)
        return lookup.shape_like(ids, values, table)

    def fetch_rows(self, variable, unique):
        """The rows `unique` (n,) of the table as a tensor (n, columns)."""
        return lookup.read_rows(table_of(variable), unique)

    def expand(self, variable, rows, unique, positions):
        """Repeats distinct rows to where they are used; sums gradients back."""
        leaf = self._leaves[id(variable)]
        leaf.notify_tapes()
        dense_shape = tf.constant(table_of(variable).shape.as_list(), unique.dtype)

        @tf.custom_gradient
        def repeat(anchor):
            def gradient(upstream):
                summed = tf.math.unsorted_segment_sum(
                    upstream, positions, tf.size(unique)
                )
                return tf.IndexedSlices(summed, unique, dense_shape)

            return tf.gather(rows, positions), gradient

        return repeat(leaf.handle)

    def read_whole(self, variable):
        """Reached when a step uses a table other than by looking rows up."""
        raise UsageError(
            "a table cannot be read whole in a step; received: a use of "
            f"{variable.path} other than keras.ops.take by rows"
        )


class _TableValue:
    """The value of a table inside a scope: an anchor for gradients, no rows."""

    def __init__(self, variable, handle, scope):
        self._variable = variable
        self._scope = scope
        self.handle = handle
        self.shape = table_of(variable).shape
        self.dtype = table_of(variable).dtype

    def __tf_tensor__(self, dtype=None, name=None):
        return self._scope.read_whole(self._variable)
