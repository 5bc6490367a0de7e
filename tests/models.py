"""Small models and data that several tests train, here and on a cluster.

Vocabulary and batch are such that every batch names every row of the table, so
that lazy row updates and Keras's dense ones must agree to rounding.
"""

import keras
import numpy as np
import tensorflow as tf

ROWS = 24
WIDTH = 8
BATCH = 32
BATCHES = 20


def arrays(rows=ROWS, every_row=True, seed=0):
    """Arrays of BATCHES batches: dict of inputs, labels."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rows, (BATCHES, BATCH, 3))
    if every_row:
        ids = np.tile(np.arange(rows), BATCHES * BATCH * 3 // rows)
        ids = ids.reshape(BATCHES, BATCH, 3)
    x = rng.normal(size=(BATCHES, BATCH, 5)).astype("float32")
    labels = (rng.random((BATCHES, BATCH, 1)) > 0.5).astype("float32")
    return {"ids": ids.astype("int32"), "x": x}, labels


def dataset(context=None, **kwargs):
    """The batches, repeated; the same for every worker."""
    return tf.data.Dataset.from_tensor_slices(arrays(**kwargs)).repeat()


def click_model(optimizer=None, rows=ROWS, dropout=0.3, seed=1):
    """Embedding, dense layers, batch normalization and dropout, compiled."""
    keras.utils.set_random_seed(seed)
    ids = keras.Input((3,), dtype="int32", name="ids")
    x = keras.Input((5,), name="x")
    table = keras.layers.Embedding(rows, WIDTH, name="table")
    h = keras.layers.Concatenate()([keras.layers.Flatten()(table(ids)), x])
    h = keras.layers.Dense(70, "relu", kernel_regularizer="l2", name="wide")(h)
    h = keras.layers.BatchNormalization(name="norm")(h)
    h = keras.layers.Dropout(dropout, seed=3)(h)
    model = keras.Model({"ids": ids, "x": x}, keras.layers.Dense(1, name="out")(h))
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def fit_locally(model, data, steps):
    """Trains with stock Keras in this process.

    Returns its metrics and its weights, as numpy: what was made before a process
    connects to a cluster cannot be read any more afterwards.

    Keras does not add up gradients of an id that occurs twice in a batch
    (IndexedSlices), which is wrong for all optimizers but SGD; so the reference
    is Keras on the dense gradient.
    """
    apply = model.optimizer.apply

    def apply_dense(grads, trainable_variables=None):
        apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)

    object.__setattr__(model.optimizer, "apply", apply_dense)
    # `fit` ends by replacing the weights by their moving average.
    object.__setattr__(model.optimizer, "finalize_variable_values", lambda v: None)
    model.reset_metrics()
    history = model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)
    metrics = {name: values[-1] for name, values in history.history.items()}
    return metrics, [np.array(weight) for weight in model.get_weights()]


def largest_difference(trained, weights):
    """Largest absolute difference of the weights of a model and given ones."""
    pairs = zip(trained.get_weights(), weights, strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - b))) for a, b in pairs)
