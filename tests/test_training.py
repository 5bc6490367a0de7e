"""Numbers of a training on parameter servers against single-process Keras."""

import keras
import models
import numpy as np
import pytest
import tensorflow as tf

from pstrain import testing
from pstrain.errors import UsageError
from pstrain.table import Table, whole_value
from pstrain.trainer import Trainer

K = keras.optimizers
STEPS = 20
SMALL = {"min_table_bytes": 700, "min_shard_bytes": 300}


def train(cluster, model, data=models.dataset, steps=STEPS, log_steps=100, **kwargs):
    trainer = Trainer(model, data, cluster, **{**SMALL, **kwargs})
    return trainer, trainer.train(steps, log_steps=log_steps)


@pytest.fixture
def one_worker():
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        yield cluster


@pytest.fixture
def two_workers():
    with testing.cluster(num_ps=2, num_workers=2) as cluster:
        yield cluster


OPTIMIZERS = {
    "sgd": lambda: K.SGD(0.1),
    "sgd with nesterov momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "sgd with weight decay": lambda: K.SGD(0.1, weight_decay=0.01),
    "sgd with ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "sgd with loss scale": lambda: K.SGD(0.1, loss_scale_factor=8.0),
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad with clipnorm": lambda: K.Adagrad(0.1, clipnorm=0.05),
    "adagrad with global clipnorm": lambda: K.Adagrad(0.1, global_clipnorm=0.1),
    "adam": lambda: K.Adam(0.01),
    "adam with a schedule": lambda: K.Adam(K.schedules.ExponentialDecay(0.01, 10, 0.9)),
    "adam with amsgrad": lambda: K.Adam(0.01, amsgrad=True),
    "adamw": lambda: K.AdamW(0.01),
    "rmsprop": lambda: K.RMSprop(0.001),
    "rmsprop with clipvalue": lambda: K.RMSprop(0.001, momentum=0.5, clipvalue=0.01),
    "ftrl": lambda: K.Ftrl(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gives_the_numbers_of_local_keras(one_worker, name):
    make = OPTIMIZERS[name]
    local_metrics, local = models.fit_locally(
        models.click_model(make()), models.dataset(), STEPS
    )
    trainer, metrics = train(one_worker, lambda: models.click_model(make()))
    assert isinstance(trainer.model.get_layer("table").embeddings._value, Table)
    assert models.largest_difference(trainer.model, local) < 2e-6
    assert metrics["loss"] == pytest.approx(local_metrics["loss"], abs=1e-6)
    assert metrics["auc"] == pytest.approx(local_metrics["auc"], abs=1e-3)


def test_rows_that_no_batch_names_are_left_alone_by_momentum(one_worker):
    def data(context):
        return models.dataset(rows=models.ROWS // 2)

    def build():
        return models.click_model(K.Adam(0.01))

    start = build().get_layer("table").get_weights()[0]
    trainer, _ = train(one_worker, build, data)
    rows = whole_value(trainer.model.get_layer("table").embeddings)
    half = models.ROWS // 2
    assert np.array_equal(rows[half:], start[half:])
    assert np.all(np.any(rows[:half] != start[:half], axis=1))


def test_an_id_that_occurs_twice_is_updated_once_with_the_sum(one_worker):
    def build():
        ids = keras.Input((2,), dtype="int32")
        rows = keras.layers.Embedding(100, 4, embeddings_initializer="ones")(ids)
        model = keras.Model(ids, keras.ops.sum(rows, axis=(1, 2)))
        model.compile(K.Adagrad(1.0, initial_accumulator_value=0.0), lambda y, p: p)
        return model

    def data(context):
        batch = np.array([[[7, 7], [7, 3]]], "int32")
        return tf.data.Dataset.from_tensor_slices((batch, np.zeros((1, 2, 1), "f")))

    trainer, _ = train(one_worker, build, data, steps=1)
    rows = whole_value(trainer.model.layers[1].embeddings)
    # With one summed gradient Adagrad's first step is exactly the learning rate.
    assert rows[7] == pytest.approx(0.0, abs=1e-5)
    assert rows[3] == pytest.approx(0.0, abs=1e-5)
    assert np.all(rows[[0, 1, 2, 4, 99]] == 1.0)


def test_steps_and_examples_are_exact_with_two_workers(two_workers):
    seen = []
    trainer = Trainer(models.click_model, models.dataset, two_workers, **SMALL)
    metrics = trainer.train(257, log_steps=50, on_interval=seen.append)
    assert trainer.step == 257
    assert int(trainer.applied_updates()) == 257
    assert [interval.step for interval in seen] == [50, 100, 150, 200, 250, 257]
    assert sum(interval.examples for interval in seen) == 257 * models.BATCH
    assert all(np.isfinite(value) for value in metrics.values())
    assert int(trainer.model.optimizer.iterations.numpy()) == 257


def test_metrics_of_an_interval_are_summed_over_workers_without_loss(two_workers):
    def build():
        return models.click_model(K.SGD(0.0), dropout=0.0)

    def data(context=None):
        return models.dataset().take(1).repeat()

    local_metrics, _ = models.fit_locally(build(), data(), 150)
    trainer, metrics = train(two_workers, build, data, steps=150, log_steps=150)
    assert metrics["loss"] == pytest.approx(local_metrics["loss"], rel=1e-5)
    assert metrics["auc"] == pytest.approx(local_metrics["auc"], abs=1e-6)
    auc = trainer.model.metrics[1].metrics[0]
    at_first_threshold = [
        float(count[0])
        for count in (
            auc.true_positives,
            auc.false_negatives,
            auc.false_positives,
            auc.true_negatives,
        )
    ]
    assert sum(at_first_threshold) == 150 * models.BATCH


def test_every_worker_reads_its_own_share_under_its_true_number(two_workers):
    contexts = []

    def data(context):
        contexts.append(context)
        share = tf.data.Dataset.range(context.worker_index, 10**6, context.num_workers)
        return share.batch(4).map(
            lambda n: (tf.cast(n[:, None], tf.float32), tf.cast(n[:, None], tf.float32))
        )

    def build():
        x = keras.Input((1,))
        model = keras.Model(x, keras.layers.Dense(1, kernel_initializer="zeros")(x))
        odd = keras.metrics.MeanMetricWrapper(lambda y, p: y % 2, name="odd")
        model.compile(K.SGD(0.0), "mse", metrics=[odd])
        return model

    trainer, metrics = train(two_workers, build, data, steps=200)
    assert [(c.worker_index, c.num_workers) for c in contexts] == [(0, 2), (1, 2)]
    # Worker 1 has the odd numbers; each did some of the steps.
    assert 0.0 < metrics["odd"] < 1.0


def test_dropout_masks_differ_from_step_to_step_and_worker_to_worker(two_workers):
    def build():
        x = keras.Input((64,))
        dropped = keras.layers.Dropout(0.5, seed=5)(x)
        # The state keeps a sum of masks weighted by nothing: steps are seen in it.
        model = keras.Model(
            x, keras.layers.Dense(1, kernel_initializer="ones")(dropped)
        )
        model.compile(K.SGD(0.0), "mse", metrics=[_DistinctSums(name="distinct")])
        return model

    def data(context):
        weights = 2.0 ** np.arange(24)
        x = np.concatenate([weights, np.zeros(40)]).astype("float32")
        return tf.data.Dataset.from_tensors((x[None], [[0.0]])).repeat()

    _, metrics = train(two_workers, build, data, steps=100)
    assert metrics["distinct"] >= 99


class _DistinctSums(keras.metrics.Metric):
    """Counts predictions by their bits, in 4096 bins: how many bins are hit."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.bins = self.add_weight(shape=(1 << 20,), initializer="zeros", name="bins")

    def update_state(self, y_true, y_pred, sample_weight=None):
        number = tf.cast(y_pred[0, 0] / 16, tf.int32) % (1 << 20)
        self.bins.assign_add(tf.one_hot(number, 1 << 20))

    def result(self):
        return keras.ops.sum(keras.ops.cast(self.bins > 0, "float32"))


@pytest.mark.parametrize("kind", ["sequential", "subclassed", "nested"])
def test_every_way_to_write_a_keras_model_trains(one_worker, kind):
    def build():
        keras.utils.set_random_seed(1)
        layers = keras.layers
        inner = [layers.Embedding(models.ROWS, models.WIDTH), layers.Flatten()]
        if kind == "sequential":
            model = keras.Sequential([*inner, layers.Dense(1)])
        elif kind == "nested":
            trunk = keras.Sequential(inner)
            ids = keras.Input((3,), dtype="int32")
            model = keras.Model(ids, layers.Dense(1)(trunk(ids)))
        else:
            model = Subclassed()
        model.compile(K.Adagrad(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    def data(context=None):
        inputs, labels = models.arrays()
        return tf.data.Dataset.from_tensor_slices((inputs["ids"], labels)).repeat()

    local_metrics, local = models.fit_locally(build(), data(), STEPS)
    trainer, metrics = train(one_worker, build, data)
    assert models.largest_difference(trainer.model, local) < 1e-6
    assert metrics["loss"] == pytest.approx(local_metrics["loss"], abs=1e-6)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(models.ROWS, models.WIDTH)
        self.flatten = keras.layers.Flatten()
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        return self.out(self.flatten(self.table(ids)))


def test_an_own_train_step_runs_as_it_is(one_worker):
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
                loss += 0.1 * keras.ops.mean(predicted**2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables, strict=True)
            )
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
            return {m.name: m.result() for m in self.metrics if m.name == "loss"}

    def build():
        keras.utils.set_random_seed(2)
        ids = keras.Input((3,), dtype="int32")
        rows = keras.layers.Embedding(models.ROWS, models.WIDTH)(ids)
        out = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
        model = Own(ids, out)
        model.compile(K.Adam(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
        return model

    def data(context=None):
        inputs, labels = models.arrays()
        return tf.data.Dataset.from_tensor_slices((inputs["ids"], labels)).repeat()

    local_metrics, local = models.fit_locally(build(), data(), STEPS)
    trainer, metrics = train(one_worker, build, data)
    assert models.largest_difference(trainer.model, local) < 1e-6
    assert metrics["loss"] == pytest.approx(local_metrics["loss"], abs=1e-6)


def test_evaluate_counts_each_example_once_and_equals_local_keras(two_workers):
    trainer, _ = train(two_workers, models.click_model)
    data = tf.data.Dataset.from_tensor_slices(models.arrays(seed=9)).unbatch()
    data = data.take(333).batch(50)  # the last batch is a partial one
    metrics = trainer.evaluate(data)
    local = models.click_model()
    local.set_weights([np.asarray(w) for w in trainer.model.get_weights()])
    expected = local.evaluate(data, verbose=0, return_dict=True)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["auc"] == pytest.approx(expected["auc"], abs=1e-5)


def test_predict_after_training_looks_rows_up(two_workers):
    trainer, _ = train(two_workers, models.click_model)
    inputs, _ = models.arrays()
    batch = {name: values[0] for name, values in inputs.items()}
    local = models.click_model()
    local.set_weights([np.asarray(w) for w in trainer.model.get_weights()])
    assert np.allclose(trainer.model.predict(batch, verbose=0), local(batch), atol=1e-6)


def test_an_error_on_a_worker_is_raised_with_its_own_type(two_workers):
    def data(context):
        batch = (np.full((1, 4), 10**6, "int32"), np.zeros((1, 1), "float32"))
        return tf.data.Dataset.from_tensors(batch).repeat()

    def build():
        ids = keras.Input((4,), dtype="int32")
        rows = keras.layers.Embedding(100, 4, name="small")(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
        model.compile("sgd", "mse")
        return model

    trainer = Trainer(build, data, two_workers, min_table_bytes=100)
    with pytest.raises(tf.errors.InvalidArgumentError, match="outside of its 100 rows"):
        trainer.train(100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: "model", "must return a keras.Model"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "must be compiled"),
        (lambda: models.click_model(K.Lamb(0.1)), "received: Lamb"),
        (lambda: models.click_model(K.Adafactor(0.1)), "received: Adafactor"),
        (
            lambda: models.click_model(K.SGD(0.1, gradient_accumulation_steps=2)),
            "gradient_accumulation_steps",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(two_workers, build, message):
    with pytest.raises(UsageError, match=message):
        Trainer(build, models.dataset, two_workers)


def test_empty_evaluation_data_is_refused(two_workers):
    trainer = Trainer(models.click_model, models.dataset, two_workers, **SMALL)
    with pytest.raises(UsageError, match="evaluation data is empty"):
        trainer.evaluate(models.dataset().take(0))
