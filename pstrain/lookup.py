"""Row lookups: what `keras.layers.Embedding` does when its table is on the ps.

Stock Keras turns the whole table into a tensor and gathers from that, which
sends every row over the network in every step.  Here only the distinct rows
that a batch names travel, and gradients go back for the same rows.

`install` puts one hook under `keras.ops.take`, which every stock layer uses; it
looks at variables that hold a `Table` and leaves all others alone.
"""

import tensorflow as tf

from pstrain import compat
from pstrain.table import table_of


def install():
    """Routes `keras.ops.take` on tables to row lookups; harmless when repeated."""
    compat.install_take_hook(_take)


def _take(variable, ids):
    if table_of(variable) is None:
        return NotImplemented
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(_take(variable, ids.flat_values))
    if isinstance(ids, tf.SparseTensor):
        ids = tf.sparse.to_dense(ids)  # as Keras: a missing entry is row 0
    ids = tf.convert_to_tensor(ids)
    scope = compat.stateless_scope()
    if hasattr(scope, "lookup"):
        rows = scope.lookup(variable, ids)
    else:
        rows = _plain_lookup(table_of(variable), ids)
    # A custom layer under a mixed policy sees the variable in its compute dtype.
    return tf.cast(rows, variable.dtype)


def _plain_lookup(table, ids):
    """A lookup outside of any step: shape inference, or a user's own call."""
    if not table.placed and not tf.executing_eagerly():
        rows = tf.zeros(tf.concat([tf.shape(ids), table.shape[1:]], 0), table.dtype)
        rows.set_shape(ids.shape.concatenate(table.shape[1:]))
        return rows
    flat = row_ids(ids, table)
    if not table.placed:
        return shape_like(ids, tf.gather(table.read(), flat), table)
    unique, positions = distinct(flat)
    return shape_like(ids, tf.gather(read_rows(table, unique), positions), table)


def row_ids(ids, table):
    """Flat row numbers of `table`: negative ids count from the end, as in Keras.

    Args:
        ids: integer or float tensor of any shape.
        table: `Table`.

    Returns:
        int32 (int64 for more than 2**31 rows) tensor of rank 1; an id outside of
        the table fails the step with the name of the table.
    """
    rows = table.shape[0]
    dtype = tf.int32 if rows <= tf.int32.max else tf.int64
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    # Clipped before the cast: a huge id must fail, not wrap around.
    low, high = max(-rows - 1, ids.dtype.min), min(rows, ids.dtype.max)
    flat = tf.cast(tf.clip_by_value(tf.reshape(ids, [-1]), low, high), dtype)
    flat = tf.where(flat < 0, flat + rows, flat)
    inside = tf.reduce_all((flat >= 0) & (flat < rows))
    message = f"{table.name}: an id lies outside of its {rows} rows; smallest, largest:"
    extremes = [message, tf.reduce_min(ids), tf.reduce_max(ids)]
    check = tf.debugging.Assert(inside, extremes)
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(flat)


def distinct(flat):
    """`(distinct values, position of each value among them)`, both rank 1."""
    return tf.unique(flat)


def split_by_shard(table, rows):
    """Sorts row numbers by the shard that holds them.

    Args:
        table: a placed `Table` of n shards.
        rows: row numbers, rank 1.

    Returns:
        `(local, order)`, lists of n tensors: the row numbers within each shard,
        and at which position of `rows` each of them stood.
    """
    starts = tf.constant(table.offsets[1:-1], rows.dtype)
    owner = tf.searchsorted(starts, rows, side="right", out_type=tf.int32)
    base = tf.gather(tf.constant(table.offsets[:-1], rows.dtype), owner)
    count = len(table.shards)
    local = tf.dynamic_partition(rows - base, owner, count)
    order = tf.dynamic_partition(tf.range(tf.size(rows)), owner, count)
    return local, order


def read_rows(table, rows):
    """Gathers rows of a placed table on its ps.

    Args:
        table: `Table`.
        rows: distinct row numbers, rank 1 of length n.

    Returns:
        Tensor of shape `(n, columns)`; one message of ids and one of rows for
        each shard.
    """
    if len(table.shards) == 1:
        return _gather_on_ps(table.shards[0], rows)
    local, order = split_by_shard(table, rows)
    parts = [_gather_on_ps(s, i) for s, i in zip(table.shards, local, strict=True)]
    values = tf.dynamic_stitch(order, parts)
    return tf.ensure_shape(values, [None, table.shape[1]])


def _gather_on_ps(shard, local_rows):
    with tf.device(shard.device):
        return shard.sparse_read(local_rows)


def shape_like(ids, values, table):
    """Gives looked-up `values` (n, columns) the shape of `ids` plus columns."""
    out = tf.reshape(values, tf.concat([tf.shape(ids), table.shape[1:]], 0))
    out.set_shape(ids.shape.concatenate(table.shape[1:]))
    return out
