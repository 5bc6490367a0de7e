"""Row lookups in tables, here on shards within this process, against gathers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from pstrain import compat, lookup, table
from pstrain.scope import StepScope

ROWS = 11
WIDTH = 3
SHARDS = {1: [0, 11], 2: [0, 6, 11], 3: [0, 1, 9, 11]}


def embedding(rows=ROWS, dtype=None, name="ids_table", **kwargs):
    """A stock layer whose embeddings are a table that is not placed yet."""
    lookup.install()
    layer = keras.layers.Embedding(rows, WIDTH, dtype=dtype, name=name, **kwargs)
    with table.creation_scope(min_table_bytes=0):
        layer.build((None,))
    assert table.table_of(layer.embeddings) is not None
    return layer


def placed(num_shards=3, **kwargs):
    layer = embedding(**kwargs)
    bounds = SHARDS[num_shards]
    whole = table.table_of(layer.embeddings)
    whole.place(
        [("CPU:0", begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    )
    assert len(whole.shards) == num_shards
    return layer


def values_of(layer):
    return table.table_of(layer.embeddings).numpy()


@pytest.fixture(params=SHARDS, ids=lambda n: f"{n} shards")
def layer(request):
    return placed(request.param)


IDS = {
    "scalar": np.int32(4),
    "1-D": np.array([0, 10, 5, 6], "int32"),
    "2-D": np.array([[0, 10, 5], [6, 1, 8]], "int32"),
    "3-D": np.arange(8, dtype="int32").reshape(2, 2, 2),
    "duplicates": np.array([[7, 7, 7], [7, 0, 7]], "int32"),
    "one shard only": np.array([9, 10, 9], "int32"),
    "none at all": np.zeros([0, 2], "int32"),
    "int64": np.array([[3, 1], [2, 10]], "int64"),
    "uint8": np.array([[3, 1], [2, 10]], "uint8"),
    "int8": np.array([[3, -1], [2, 10]], "int8"),
    "float32": np.array([[3, 1], [2, 10]], "float32"),
    "float64 with fractions": np.array([3.9, 1.2], "float64"),
    "bool": np.array([True, False, True]),
    "negative": np.array([-1, -11, 3, -5], "int32"),
    "negative int64": np.array([[-1], [-11]], "int64"),
}


@pytest.mark.parametrize("name", IDS)
def test_a_lookup_equals_a_gather_of_the_whole_table(layer, name):
    ids = IDS[name]
    rows = layer(tf.constant(ids))
    expected = values_of(layer)[ids.astype("int64")]
    assert rows.dtype == tf.float32
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("name", IDS)
def test_stock_keras_gives_the_same(layer, name):
    stock = keras.layers.Embedding(ROWS, WIDTH)
    stock.build((None,))
    stock.set_weights([values_of(layer)])
    ids = tf.constant(IDS[name])
    assert np.array_equal(layer(ids), stock(ids))


def test_within_a_function_of_unknown_shapes(layer):
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def look_up(ids):
        rows = layer(ids)
        assert rows.shape.as_list() == [None, 2, WIDTH]
        return rows

    for ids in ([[1, 2], [10, 2], [0, 0]], np.zeros([0, 2])):
        ids = np.array(ids, "int64")
        assert np.array_equal(look_up(ids), values_of(layer)[ids])


def test_ragged_ids_give_ragged_rows(layer):
    ids = tf.ragged.constant([[1, 10], [], [5, 5, 0]], dtype=tf.int32)
    rows = keras.ops.take(layer.embeddings, ids, axis=0)
    expected = keras.ops.take(keras.Variable(values_of(layer)), ids, axis=0)
    assert isinstance(rows, tf.RaggedTensor)
    assert rows.row_lengths().numpy().tolist() == [2, 0, 3]
    assert np.array_equal(rows.flat_values, expected.flat_values)


def test_sparse_ids_read_row_0_where_there_is_none(layer):
    ids = tf.sparse.from_dense(np.array([[3, 0], [0, 10]], "int32"))
    rows = keras.ops.take(layer.embeddings, ids, axis=0)
    assert np.array_equal(rows, values_of(layer)[[[3, 0], [0, 10]]])
    stock = keras.Variable(values_of(layer))
    assert np.array_equal(rows, keras.ops.take(stock, ids, axis=0))


def test_mask_zero_masks_id_0():
    layer = placed(2, mask_zero=True)
    ids = tf.constant([[3, 0, 10], [0, 0, 1]])
    rows = layer(ids)
    assert np.array_equal(rows, values_of(layer)[ids.numpy()])
    mask = [[True, False, True], [False, False, True]]
    assert layer.compute_mask(ids).numpy().tolist() == mask
    averaged = keras.layers.GlobalAveragePooling1D()(rows, mask=layer.compute_mask(ids))
    assert np.allclose(averaged[1], values_of(layer)[1])


@pytest.mark.parametrize(
    ("policy", "stored", "computed"),
    [
        ("float32", "float32", "float32"),
        ("mixed_float16", "float32", "float16"),
        ("mixed_bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float64", "float64", "float64"),
    ],
)
def test_rows_come_in_the_compute_dtype_of_the_layer(policy, stored, computed):
    layer = placed(2, dtype=policy)
    whole = table.table_of(layer.embeddings)
    rows = layer(tf.constant([10, 2]))
    assert (whole.dtype.name, rows.dtype.name) == (stored, computed)
    assert np.array_equal(rows, tf.cast(whole.numpy()[[10, 2]], computed))


# ---- ids outside of the table ----------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        np.array([0, 11], "int32"),
        np.array([-12], "int32"),
        np.array([2**31 - 1], "int32"),
        np.array([-(2**31)], "int32"),
        np.array([2**32], "int64"),  # would be 0 as an int32
        np.array([-(2**63), 2**63 - 1], "int64"),
        np.array([255], "uint8"),
        np.array([3e9], "float32"),
        np.array([np.nan], "float32"),
    ],
    ids=lambda ids: f"{ids.dtype} {ids[-1]}",
)
def test_an_id_outside_of_the_table_is_an_error_that_names_it(layer, ids):
    expected = r"ids_table/embeddings: an id lies outside of its 11 rows"
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        layer(tf.constant(ids))


def test_the_error_tells_the_smallest_and_the_largest_id(layer):
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)-3.*123456"):
        layer(tf.constant([[5, -3], [123456, 1]]))


def test_the_error_also_ends_a_function(layer):
    look_up = tf.function(lambda ids: layer(ids))
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside of its 11 rows"):
        look_up(tf.constant([11]))


# ---- row numbers and shards ------------------------------------------------------


def described(rows):
    """A table of any size: it has no values."""
    return table.Table(None, (rows, 1), "float32", "huge", True)


@pytest.mark.parametrize("rows", [1, 100, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_row_numbers_are_32_bits_where_they_fit(rows, dtype):
    ids = tf.constant([0, rows - 1, -1, -rows], dtype)
    numbers = lookup.row_ids(ids, described(rows))
    assert numbers.dtype == tf.int32
    assert numbers.numpy().tolist() == [0, rows - 1, rows - 1, 0]


@pytest.mark.parametrize("rows", [2**31, 10**10])
def test_row_numbers_of_larger_tables_have_64_bits(rows):
    ids = tf.constant([0, rows - 1, -1, -rows], "int64")
    numbers = lookup.row_ids(ids, described(rows))
    assert numbers.dtype == tf.int64
    assert numbers.numpy().tolist() == [0, rows - 1, rows - 1, 0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="huge"):
        lookup.row_ids(tf.constant([rows], "int64"), described(rows))


def test_a_table_beyond_32_bits_takes_32_bit_ids():
    ids = tf.constant([5, 2**31 - 1, -1, -(2**31)], "int32")
    numbers = lookup.row_ids(ids, described(10**10))
    assert numbers.numpy().tolist() == [
        5,
        2**31 - 1,
        10**10 - 1,
        10**10 - 2**31,
    ]


def test_rows_are_sorted_to_the_shards_that_hold_them():
    whole = table.table_of(placed(3).embeddings)  # rows 0, 1 to 8, 9 to 10
    local, order = lookup.split_by_shard(whole, tf.constant([10, 0, 8, 1, 9]))
    assert [part.numpy().tolist() for part in local] == [[0], [7, 0], [1, 0]]
    assert [part.numpy().tolist() for part in order] == [[1], [2, 3], [0, 4]]


def test_a_shard_without_rows_of_the_batch_gets_an_empty_message():
    whole = table.table_of(placed(3).embeddings)
    local, _ = lookup.split_by_shard(whole, tf.constant([10]))
    assert [part.shape.as_list() for part in local] == [[0], [0], [1]]
    assert np.array_equal(
        lookup.read_rows(whole, tf.constant([10])), whole.numpy()[[10]]
    )


def test_rows_keep_the_order_of_their_ids_over_shards(layer):
    whole = table.table_of(layer.embeddings)
    ids = np.random.default_rng(0).permutation(ROWS).astype("int32")
    assert np.array_equal(lookup.read_rows(whole, ids), whole.numpy()[ids])


def test_each_distinct_row_is_read_once(layer, monkeypatch):
    asked = []
    read_rows = lookup.read_rows

    def spy(whole, rows):
        asked.append(rows.numpy().tolist())
        return read_rows(whole, rows)

    monkeypatch.setattr(lookup, "read_rows", spy)
    layer(tf.constant([[7, 1, 7], [1, -4, 7]]))
    assert asked == [[7, 1]]


# ---- inside a training step ------------------------------------------------------


def step_gradient(layer, ids, weights):
    """Rows, and the gradient by the table of a weighted sum of them."""
    variable = layer.embeddings
    scope = StepScope([], tables=[variable])
    with scope, tf.GradientTape() as tape:
        rows = layer(ids)
        loss = tf.reduce_sum(tf.cast(rows, "float32") * weights)
        return rows, tape.gradient(loss, variable)


@pytest.mark.parametrize("name", ["1-D", "3-D", "duplicates", "negative", "uint8"])
def test_the_gradient_has_one_row_for_each_distinct_id(layer, name):
    ids = tf.constant(IDS[name])
    weights = np.random.default_rng(0).normal(size=(*ids.shape, WIDTH))
    rows, gradient = step_gradient(layer, ids, weights.astype("float32"))
    assert np.array_equal(rows, values_of(layer)[IDS[name].astype("int64")])
    assert isinstance(gradient, tf.IndexedSlices)
    indices = gradient.indices.numpy().tolist()
    assert len(set(indices)) == len(indices)
    assert gradient.dense_shape.numpy().tolist() == [ROWS, WIDTH]
    expected = np.zeros((ROWS, WIDTH))
    np.add.at(expected, IDS[name].astype("int64") % ROWS, weights)
    assert np.allclose(tf.convert_to_tensor(gradient), expected, atol=1e-6)


def test_two_lookups_of_one_table_add_their_gradients(layer):
    variable = layer.embeddings
    scope = StepScope([], tables=[variable])
    with scope, tf.GradientTape() as tape:
        first = tf.reduce_sum(layer(tf.constant([1, 10])))
        second = tf.reduce_sum(layer(tf.constant([[10, 10]])))
        gradient = tape.gradient(first + 5.0 * second, variable)
    dense = tf.convert_to_tensor(gradient).numpy()
    assert dense[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 11]


def test_no_gradient_where_the_step_does_not_look_up(layer):
    variable = layer.embeddings
    with StepScope([], tables=[variable]), tf.GradientTape() as tape:
        loss = tf.constant(1.0)
        assert tape.gradient(loss, variable) is None


def test_a_table_under_mixed_precision_gets_a_gradient_of_its_own_dtype():
    layer = placed(2, dtype="mixed_float16")
    rows, gradient = step_gradient(layer, tf.constant([2, 2, 10]), 1.0)
    assert rows.dtype == tf.float16
    assert gradient.values.dtype == tf.float32


def test_a_step_may_not_read_a_table_whole(layer):
    with StepScope([], tables=[layer.embeddings]):
        with pytest.raises(Exception, match="table cannot be read whole.*ids_table"):
            keras.ops.sum(layer.embeddings)


# ---- what is left alone ----------------------------------------------------------


def test_other_variables_and_other_axes_are_left_to_keras(layer):
    plain = keras.Variable(np.arange(12.0).reshape(4, 3))
    assert np.array_equal(
        keras.ops.take(plain, tf.constant([3, 0]), axis=0), plain.numpy()[[3, 0]]
    )
    assert np.array_equal(
        keras.ops.take(layer.embeddings, tf.constant([2, 0]), axis=1),
        values_of(layer)[:, [2, 0]],
    )
    assert np.array_equal(
        keras.ops.take(np.arange(5), np.array([4, 1]), axis=0), [4, 1]
    )


def test_a_table_without_values_yet_answers_shape_inference_with_zeros():
    layer = embedding()

    @tf.function(input_signature=[tf.TensorSpec([None, 5], tf.int32)])
    def look_up(ids):
        rows = layer(ids)
        assert rows.shape.as_list() == [None, 5, WIDTH]
        return rows

    assert np.array_equal(look_up(np.ones([2, 5], "int32")), np.zeros([2, 5, WIDTH]))


def test_a_table_without_values_yet_answers_eagerly_with_its_initial_ones():
    layer = embedding(embeddings_initializer=keras.initializers.RandomNormal(seed=1))
    expected = keras.initializers.RandomNormal(seed=1)((ROWS, WIDTH))
    assert np.array_equal(layer(tf.constant([10, -1])), expected.numpy()[[10, 10]])


def test_a_symbolic_input_makes_a_functional_model(layer):
    ids = keras.Input((2,), dtype="int32")
    model = keras.Model(ids, keras.layers.Flatten()(layer(ids)))
    assert model.output_shape == (None, 2 * WIDTH)
    batch = np.array([[1, 10], [0, 5]], "int32")
    expected = values_of(layer)[batch].reshape(2, -1)
    assert np.array_equal(model(batch), expected)
    assert np.array_equal(model.predict(batch, verbose=0), expected)


def test_installing_the_hook_again_changes_nothing(layer):
    for _ in range(3):
        lookup.install()
    hook = compat.keras_numpy.take
    assert np.array_equal(layer(tf.constant([3])), values_of(layer)[[3]])
    assert compat.keras_numpy.take is hook
