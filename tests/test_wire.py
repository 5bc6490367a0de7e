"""Several tensors as one message, there and back."""

import numpy as np
import pytest
import tensorflow as tf

from pstrain import wire

NUMBERS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64", "uint32", "uint64"]


def round_trip(tensors):
    specs = [(tensor.dtype, tensor.shape.as_list()) for tensor in tensors]
    return wire.unpack(wire.pack(tensors), specs)


def bits(tensor):
    return tensor.numpy().tobytes()


def assert_same(received, sent):
    assert len(received) == len(sent)
    for one, other in zip(received, sent, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert bits(one) == bits(other)


@pytest.mark.parametrize("dtype", NUMBERS + INTEGERS)
@pytest.mark.parametrize("shape", [[], [1], [7], [3, 5], [2, 3, 4]])
def test_every_bit_arrives(dtype, shape):
    dtype = tf.as_dtype(dtype)
    size = int(np.prod(shape)) * dtype.size
    random = np.random.default_rng(0).integers(0, 256, size, "uint8")
    tensor = tf.constant(random.view(dtype.as_numpy_dtype).reshape(shape))
    assert_same(round_trip([tensor]), [tensor])


@pytest.mark.parametrize("dtype", NUMBERS)
def test_special_numbers(dtype):
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-7]
    tensor = tf.constant(values, dtype)
    assert_same(round_trip([tensor]), [tensor])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_extreme_integers(dtype):
    dtype = tf.as_dtype(dtype)
    tensor = tf.constant([dtype.min, dtype.max, 0, 1], dtype)
    assert_same(round_trip([tensor]), [tensor])


def test_tensors_of_all_dtypes_share_a_message():
    tensors = [
        tf.cast(tf.range(i, i + 3 * (i + 1)), dtype)
        for i, dtype in enumerate(NUMBERS + INTEGERS)
    ]
    message = wire.pack(tensors)
    assert message.dtype == tf.uint8
    assert message.shape == [sum(t.shape[0] * t.dtype.size for t in tensors)]
    assert_same(round_trip(tensors), tensors)


@pytest.mark.parametrize("shape", [[0], [0, 16], [3, 0]])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
def test_empty_tensors_between_others(dtype, shape):
    tensors = [
        tf.constant(1.5),
        tf.zeros(shape, dtype),
        tf.constant([2, 3], tf.int64),
        tf.zeros(shape, dtype),
    ]
    assert_same(round_trip(tensors), tensors)


def test_sizes_may_be_known_only_when_it_runs():
    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 3], tf.float32),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def there_and_back(rows, ids):
        message = wire.pack([rows, ids, tf.size(ids)])
        count, total = tf.shape(rows)[0], tf.size(ids)
        specs = [(tf.float32, [count, 3]), (tf.int64, [total]), (tf.int32, [])]
        return wire.unpack(message, specs)

    for count, total in [(4, 2), (0, 5), (3, 0), (0, 0)]:
        rows = tf.random.uniform([count, 3])
        ids = tf.range(total, dtype=tf.int64)
        assert_same(there_and_back(rows, ids), [rows, ids, tf.constant(total)])


def test_a_message_of_another_size_is_an_error():
    message = wire.pack([tf.zeros([3])])
    for shape in ([2], [4]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            wire.unpack(message, [(tf.float32, shape)])


def test_a_message_is_contiguous_and_little_endian_so_that_it_may_be_cut():
    message = wire.pack([tf.constant(258, tf.int32), tf.constant([1.0])])
    assert message.numpy().tolist() == [2, 1, 0, 0, 0, 0, 128, 63]
    rest = wire.unpack(message[4:], [(tf.float32, [1])])
    assert rest[0].numpy().tolist() == [1.0]
