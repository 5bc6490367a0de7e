"""Several tensors as one message.

Every tensor that crosses between two tasks is a remote call of its own, and in a
training step the number of calls costs more than their bytes.  `pack` turns
tensors of any dtypes into one vector of bytes, `unpack` turns it back on the
other side; both run as ordinary TensorFlow operations inside the step.
"""

import math

import tensorflow as tf


def pack(tensors):
    """Concatenates the bytes of `tensors` into one uint8 tensor of rank 1."""
    return tf.concat([_to_bytes(t) for t in tensors], 0)


def unpack(message, specs):
    """Takes a packed message apart.

    Args:
        message: uint8 tensor from `pack`.
        specs: list of `(dtype, shape)`, one for each packed tensor; a shape is a
            list whose items are ints or scalar int32 tensors.

    Returns:
        The list of tensors.
    """
    sizes = [math.prod(shape) * dtype.size for dtype, shape in specs]
    parts = tf.split(message, tf.stack(sizes), num=len(specs))
    return [
        _from_bytes(part, dtype, shape)
        for part, (dtype, shape) in zip(parts, specs, strict=True)
    ]


def _to_bytes(tensor):
    if tensor.dtype != tf.uint8:
        tensor = tf.bitcast(tensor, tf.uint8)
    return tf.reshape(tensor, [-1])


def _from_bytes(part, dtype, shape):
    if dtype.size > 1:
        part = tf.reshape(part, [-1, dtype.size])
    return tf.reshape(tf.bitcast(part, dtype), tf.stack([*shape]) if shape else [])
