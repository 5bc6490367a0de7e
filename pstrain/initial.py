"""Initial values of a block of rows, without making the rows around it.

A table is larger than one machine, so each ps makes the rows of its own shard.
The values are those that the whole initializer would have given: TensorFlow's
stateless generators are counters (Philox), so a block begins by setting the
counter.  Anything else would make a model depend on the number of ps.
"""

import keras
import numpy as np
import tensorflow as tf

from pstrain.errors import UsageError

# Values made at once; bounds the memory a ps needs beyond its shard.
CHUNK_BYTES = 64 << 20
# Up to this size an initializer that cannot be cut is run whole and sliced.
WHOLE_LIMIT_BYTES = 64 << 20

_PHILOX = 1
# Outputs of one counter step, and counter steps that one group of outputs takes:
# rejection sampling reserves room for its retries.
_OUTPUTS_PER_GROUP = 4
_COUNTER_STEPS = {"uniform": 1, "normal": 1, "truncated_normal": 256}
# Standard deviation of a unit normal cut at two sigma (keras.initializers).
_TRUNCATED_STDDEV = 0.87962566103423978


def check(initializer, shape, dtype, path):
    """Refuses a table whose initial value cannot be made in blocks of rows.

    Raises:
        UsageError: naming the variable and its initializer.
    """
    if _is_constant(initializer) or _random_law(initializer, shape, dtype):
        return
    size = int(np.prod(shape)) * tf.as_dtype(dtype).size
    if size > WHOLE_LIMIT_BYTES:
        raise UsageError(
            f"the initial value of {path} cannot be made in blocks of rows, and "
            f"is too large to be made whole; received: initializer "
            f"{type(initializer).__name__} for {size:,} bytes; use one of Keras's "
            "constant, uniform, normal or variance-scaling initializers with an "
            "integer or no seed"
        )


def rows(initializer, shape, begin, end, dtype):
    """Rows `[begin, end)` of `initializer(shape, dtype)`, bit for bit.

    Args:
        initializer: a `keras.initializers.Initializer` or callable.
        shape: `(rows, columns)` of the whole variable.
        begin: int, first row.
        end: int, row after the last.
        dtype: `tf.DType` or its name.

    Returns:
        Tensor of shape `(end - begin, columns)` on the current device.
    """
    block = (end - begin, *shape[1:])
    dtype = tf.as_dtype(dtype)
    if _is_constant(initializer):
        return tf.cast(initializer(block, dtype=dtype.name), dtype)
    law = _random_law(initializer, shape, dtype)
    if law is None:
        return tf.cast(initializer(shape, dtype=dtype.name), dtype)[begin:end]
    kind, scale, shift = law
    values = _stateless_block(kind, initializer.seed, shape[1], begin, end, dtype)
    return values * tf.cast(scale, dtype) + tf.cast(shift, dtype)


def _computes_as(initializer, kind):
    """Whether an initializer is of a kind and has no `__call__` of its own."""
    return type(initializer).__call__ is kind.__call__


def _is_constant(initializer):
    kinds = keras.initializers
    if _computes_as(initializer, kinds.Constant):
        return np.ndim(initializer.value) == 0
    return any(_computes_as(initializer, kind) for kind in (kinds.Zeros, kinds.Ones))


def _random_law(initializer, shape, dtype):
    """`(kind, scale, shift)` of a seeded random initializer, or None."""
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int) or len(shape) != 2 or tf.as_dtype(dtype) != tf.float32:
        return None
    kinds = keras.initializers
    if _computes_as(initializer, kinds.RandomUniform):
        low, high = initializer.minval, initializer.maxval
        return "uniform", np.float32(high) - np.float32(low), low
    if _computes_as(initializer, kinds.RandomNormal):
        return "normal", initializer.stddev, initializer.mean
    if _computes_as(initializer, kinds.TruncatedNormal):
        return "truncated_normal", initializer.stddev, initializer.mean
    if _computes_as(initializer, kinds.VarianceScaling):
        return _variance_scaling_law(initializer, shape)
    return None


def _variance_scaling_law(initializer, shape):
    fan_in, fan_out = shape
    axes = [getattr(initializer, name, None) for name in ("input_axes", "output_axes")]
    if axes != [None, None]:
        return None  # fans of the user's own choice
    fan = {
        "fan_in": max(1.0, fan_in),
        "fan_out": max(1.0, fan_out),
        "fan_avg": max(1.0, (fan_in + fan_out) / 2.0),
    }[initializer.mode]
    variance = initializer.scale / fan
    if initializer.distribution == "uniform":
        limit = np.float32(np.sqrt(3.0 * variance))
        return "uniform", limit + limit, -limit
    stddev = float(np.sqrt(variance))
    if initializer.distribution == "truncated_normal":
        return "truncated_normal", stddev / _TRUNCATED_STDDEV, 0.0
    return "normal", stddev, 0.0


def _stateless_block(kind, seed, columns, begin, end, dtype):
    """Unit random values of rows `[begin, end)` of a matrix drawn from `seed`."""
    sample = {
        "uniform": tf.raw_ops.StatelessRandomUniformV2,
        "normal": tf.raw_ops.StatelessRandomNormalV2,
        "truncated_normal": tf.raw_ops.StatelessTruncatedNormalV2,
    }[kind]
    # Keras brings an integer seed into TensorFlow's range in this way.
    pair = tf.constant([seed % (tf.int32.max - 1), 0], tf.int32)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=pair)
    group, lead = divmod(begin * columns, _OUTPUTS_PER_GROUP)
    skip = tf.constant([group * _COUNTER_STEPS[kind], 0], counter.dtype)
    count = lead + (end - begin) * columns
    values = sample(
        shape=[count], key=key, counter=counter + skip, alg=_PHILOX, dtype=dtype
    )
    return tf.reshape(values[lead:], [end - begin, columns])
