"""Blocks of initial values against what Keras gives for the whole variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pstrain import initial
from pstrain.errors import UsageError

I = keras.initializers  # noqa: E741 - as short as `K` elsewhere

DECOMPOSABLE = {
    "zeros": lambda seed: I.Zeros(),
    "ones": lambda seed: I.Ones(),
    "constant": lambda seed: I.Constant(0.3),
    "uniform": lambda seed: I.RandomUniform(-0.07, 0.2, seed=seed),
    "uniform default": lambda seed: I.RandomUniform(seed=seed),
    "normal": lambda seed: I.RandomNormal(0.5, 0.3, seed=seed),
    "truncated normal": lambda seed: I.TruncatedNormal(-1.0, 2.0, seed=seed),
    "glorot uniform": lambda seed: I.GlorotUniform(seed=seed),
    "glorot normal": lambda seed: I.GlorotNormal(seed=seed),
    "he uniform": lambda seed: I.HeUniform(seed=seed),
    "he normal": lambda seed: I.HeNormal(seed=seed),
    "lecun uniform": lambda seed: I.LecunUniform(seed=seed),
    "lecun normal": lambda seed: I.LecunNormal(seed=seed),
    **{
        f"variance scaling {mode} {distribution}": (
            lambda seed, mode=mode, distribution=distribution: I.VarianceScaling(
                0.7, mode, distribution, seed=seed
            )
        )
        for mode in ("fan_in", "fan_out", "fan_avg")
        for distribution in ("uniform", "truncated_normal", "untruncated_normal")
    },
}
RANDOM_KINDS = ("uniform", "normal", "truncated normal")


def whole(initializer, shape, dtype="float32"):
    return np.asarray(initializer(shape, dtype=dtype))


def in_blocks(initializer, shape, bounds, dtype="float32"):
    blocks = [
        initial.rows(initializer, shape, begin, end, dtype)
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    for block, begin, end in zip(blocks, bounds, bounds[1:], strict=False):
        assert block.shape == (end - begin, *shape[1:])
        assert block.dtype == tf.as_dtype(dtype)
    return np.concatenate([block.numpy() for block in blocks])


@pytest.mark.parametrize("name", DECOMPOSABLE)
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_blocks_are_bit_for_bit_the_rows_of_the_whole(name, columns):
    initializer, shape = DECOMPOSABLE[name](7), (53, columns)
    # Cut inside of groups of four outputs, and a block of a single row.
    assert np.array_equal(
        in_blocks(initializer, shape, [0, 1, 13, 32, 53]), whole(initializer, shape)
    )


@pytest.mark.parametrize("name", RANDOM_KINDS)
@pytest.mark.parametrize(
    "seed", [0, 1, -1, -123456789, 2**31 - 2, 2**31 - 1, 2**31, 2**40 + 3, -(2**50)]
)
def test_every_integer_is_a_seed(name, seed):
    initializer, shape = DECOMPOSABLE[name](seed), (10, 5)
    assert np.array_equal(
        in_blocks(initializer, shape, [0, 3, 10]), whole(initializer, shape)
    )


@pytest.mark.parametrize("name", RANDOM_KINDS)
def test_a_variable_so_large_that_threads_share_it(name):
    initializer, shape = DECOMPOSABLE[name](11), (300_001, 7)
    expected = whole(initializer, shape)
    assert np.array_equal(
        in_blocks(initializer, shape, [0, 123_457, 300_001]), expected
    )
    # Any block for itself, also far behind and without those before it.
    last = initial.rows(initializer, shape, 299_990, 300_001, "float32")
    assert np.array_equal(last, expected[299_990:])


def test_without_a_seed_blocks_still_belong_together():
    initializer = I.RandomUniform()
    assert np.array_equal(
        in_blocks(initializer, (20, 4), [0, 9, 20]), whole(initializer, (20, 4))
    )


@pytest.mark.parametrize("name", ["uniform", "glorot normal", "zeros"])
def test_initializers_by_name_as_layers_give_them(name):
    initializer = keras.layers.Embedding(
        9, 4, embeddings_initializer=name.replace(" ", "_")
    ).embeddings_initializer
    assert np.array_equal(
        in_blocks(initializer, (9, 4), [0, 5, 9]), whole(initializer, (9, 4))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["constant", *RANDOM_KINDS, "he normal"])
def test_other_dtypes(name, dtype):
    initializer = DECOMPOSABLE[name](3)
    assert np.array_equal(
        in_blocks(initializer, (21, 3), [0, 2, 21], dtype),
        whole(initializer, (21, 3), dtype),
    )


def test_axes_of_variance_scaling_change_the_scale_of_blocks_too():
    initializer = I.HeUniform(seed=4, input_axes=[1], output_axes=[0])
    assert np.array_equal(
        in_blocks(initializer, (30, 4), [0, 7, 30]), whole(initializer, (30, 4))
    )


class _Doubled(I.GlorotUniform):
    def __call__(self, shape, dtype=None):
        return 2 * super().__call__(shape, dtype)


class _Diagonal(I.Zeros):
    def __call__(self, shape, dtype=None):
        return keras.ops.eye(*shape, dtype=dtype)


NOT_DECOMPOSABLE = {
    "Orthogonal": lambda: I.Orthogonal(seed=5),
    "Identity": lambda: I.Identity(2.0),
    "Constant": lambda: I.Constant(np.arange(32.0).reshape(8, 4)),
    "_Doubled": lambda: _Doubled(seed=5),
    "_Diagonal": lambda: _Diagonal(),
    "function": lambda: (
        lambda shape, dtype: tf.reshape(tf.range(32, dtype=dtype), shape)
    ),
}


@pytest.mark.parametrize("name", NOT_DECOMPOSABLE)
def test_a_small_variable_may_have_any_initializer(name):
    initializer, shape = NOT_DECOMPOSABLE[name](), (8, 4)
    initial.check(initializer, shape, "float32", "table")
    assert np.array_equal(
        in_blocks(initializer, shape, [0, 3, 8]), whole(initializer, shape)
    )


@pytest.mark.parametrize("name", NOT_DECOMPOSABLE)
def test_a_large_variable_with_such_an_initializer_is_refused_by_name(name):
    rows = initial.WHOLE_LIMIT_BYTES // 16
    initial.check(NOT_DECOMPOSABLE[name](), (rows, 4), "float32", "deep/table")
    with pytest.raises(UsageError) as error:
        initial.check(NOT_DECOMPOSABLE[name](), (rows + 1, 4), "float32", "deep/table")
    message = str(error.value)
    assert "deep/table" in message
    assert f"received: initializer {name} for 67,108,880 bytes" in message


@pytest.mark.parametrize("name", DECOMPOSABLE)
def test_a_large_variable_with_an_initializer_of_keras_is_accepted(name):
    initial.check(DECOMPOSABLE[name](1), (10**9, 64), "float32", "table")


def test_a_large_half_precision_variable_is_refused_if_random():
    shape = (10**9, 64)
    initial.check(I.Zeros(), shape, "bfloat16", "table")
    with pytest.raises(UsageError, match="RandomUniform"):
        initial.check(I.RandomUniform(seed=1), shape, "bfloat16", "table")


def test_a_seed_generator_is_no_seed_of_blocks():
    initializer = I.RandomUniform(seed=keras.random.SeedGenerator(1))
    with pytest.raises(UsageError, match="an integer or no seed"):
        initial.check(initializer, (10**9, 64), "float32", "table")


def test_no_more_than_the_block_is_made():
    # The whole would be 256 TB.
    block = initial.rows(
        I.RandomNormal(seed=1), (10**12, 64), 10**11, 10**11 + 5, "float32"
    )
    assert block.shape == (5, 64)
    assert np.unique(block).size == 5 * 64
