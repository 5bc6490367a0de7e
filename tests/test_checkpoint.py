"""Checkpoints: their keys and files, other clusters, other models, and deaths."""

import json
import os
import pathlib
import re
import shutil

import keras
import models
import numpy as np
import pytest
import tensorflow as tf

from pstrain import blueprint, checkpoint, compat, testing
from pstrain.checkpoint import Part, Slice
from pstrain.errors import JobError, UsageError
from pstrain.table import whole_value
from pstrain.trainer import Trainer

K = keras.optimizers
SMALL = {"min_table_bytes": 700, "min_shard_bytes": 300}
# Three names of one device: each writes a file of its own.
DEVICES = ["CPU:0", "/CPU:0", "/device:CPU:0"]


class Holder:
    """Values in blocks on several devices, as a cluster would hold them."""

    def __init__(self, values, num_blocks=1):
        self.blocks = {}
        self.values = {key: np.asarray(value) for key, value in values.items()}
        for key, value in self.values.items():
            rows = value.shape[0] if value.ndim else 1
            ends = np.linspace(0, rows, min(rows, num_blocks) + 1).astype(int)
            for begin, end in zip(ends[:-1], ends[1:], strict=True):
                self.blocks[key, int(begin), int(end)] = None

    def parts(self):
        by_device = {}
        for number, block in enumerate(self.blocks):
            device = DEVICES[number % len(DEVICES)]
            by_device.setdefault(device, []).append(block)
        return [self._part(device, keys) for device, keys in by_device.items()]

    def _part(self, device, blocks):
        def read():
            return [
                tf.constant(
                    self.values[k][b:e] if self.values[k].ndim else self.values[k]
                )
                for k, b, e in blocks
            ]

        def write(tensors):
            for block, tensor in zip(blocks, tensors, strict=True):
                self.blocks[block] = tensor.numpy()

        slices = [
            Slice(k, self.values[k].shape, b, e, tf.as_dtype(self.values[k].dtype))
            for k, b, e in blocks
        ]
        return Part(device, slices, read, write)

    def restored(self, key):
        blocks = [value for (k, _, _), value in self.blocks.items() if k == key]
        return np.concatenate(blocks) if blocks[0].ndim else blocks[0]


def files(directory):
    """Names and bytes of everything in a directory."""
    root = pathlib.Path(directory)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def save(directory, step, value=0.0, **kwargs):
    holder = Holder({"v": np.full((4, 2), value, "float32")}, num_blocks=2)
    return checkpoint.save(str(directory), step, holder.parts(), {}, **kwargs)


VALUES = {
    "rank 2": np.arange(33, dtype="float32").reshape(11, 3) / 7,
    "rank 1": np.arange(10, dtype="float64") / 3,
    "rank 4": np.arange(7 * 2 * 3 * 2, dtype="float32").reshape(7, 2, 3, 2),
    "integer": np.array([2**40, -5, 7]),
    "scalar": np.float32(0.1),
    "one row": np.ones((1, 3), "float32"),
}


# ---- files, blocks, names --------------------------------------------------------


@pytest.mark.parametrize("saved_in", [1, 2, 5])
@pytest.mark.parametrize("restored_in", [1, 3, 4])
def test_blocks_of_any_cut_come_back_in_any_other(tmp_path, saved_in, restored_in):
    path = checkpoint.save(str(tmp_path), 7, Holder(VALUES, saved_in).parts(), {})
    holder = Holder({k: np.zeros_like(v) for k, v in VALUES.items()}, restored_in)
    assert checkpoint.restore(path, holder.parts(), []) == {}
    for key, value in VALUES.items():
        restored = holder.restored(key)
        assert restored.dtype == value.dtype
        assert np.array_equal(restored, value), key


@pytest.mark.parametrize(
    ("dtype", "saved_in"),
    [
        ("float16", "float32"),  # TensorFlow cannot read slices of the left ones
        ("bool", "uint8"),
        ("uint16", "int32"),
        ("uint32", "int64"),
        ("bfloat16", "bfloat16"),
        ("int64", "int64"),
        ("int8", "int8"),
    ],
)
def test_every_dtype_can_be_cut(tmp_path, dtype, saved_in):
    dtype = tf.as_dtype(dtype)
    values = np.arange(24).reshape(8, 3).astype(dtype.as_numpy_dtype)
    if dtype != tf.bool:
        values[0, :2] = [dtype.min, dtype.max]
    path = checkpoint.save(str(tmp_path), 7, Holder({"v": values}, 2).parts(), {})
    holder = Holder({"v": values}, 3)
    checkpoint.restore(path, holder.parts(), [])
    restored = holder.restored("v")
    assert restored.dtype == values.dtype
    assert restored.tobytes() == values.tobytes()
    assert tf.train.load_checkpoint(path).get_tensor("v").dtype == saved_in


def test_tensorflow_reads_whole_tensors_whatever_the_cut(tmp_path):
    path = checkpoint.save(str(tmp_path), 7, Holder(VALUES, 3).parts(), {"own": 2.5})
    reader = tf.train.load_checkpoint(str(tmp_path))
    for key, value in VALUES.items():
        assert reader.get_variable_to_shape_map()[key] == list(value.shape)
        assert np.array_equal(reader.get_tensor(key), value)
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    assert reader.get_tensor("own") == 2.5
    assert reader.get_tensor("pstrain/global_step") == 7
    assert json.loads(reader.get_tensor("pstrain/metadata"))["format"] == 1


def test_what_the_coordinator_wants_of_its_own_comes_back_if_it_is_there(tmp_path):
    path = checkpoint.save(str(tmp_path), 7, [], {"seeds/0": np.array([1, 2])})
    local = checkpoint.restore(path, [], ["seeds/0", "seeds/1"])
    assert list(local) == ["seeds/0"]
    assert local["seeds/0"].tolist() == [1, 2]
    assert checkpoint.read_step(path) == 7


def test_the_newest_five_are_kept(tmp_path):
    for step in range(0, 80, 10):
        save(tmp_path, step)
    names = set(os.listdir(tmp_path))
    steps = {re.match(r"ckpt-(\d+)\.", name)[1] for name in names - {"checkpoint"}}
    assert steps == {"30", "40", "50", "60", "70"}
    assert all((tmp_path / f"ckpt-{step}.index").exists() for step in steps)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == [
        "ckpt-30",
        "ckpt-40",
        "ckpt-50",
        "ckpt-60",
        "ckpt-70",
    ]


def test_nothing_but_checkpoints_of_ours_is_removed(tmp_path):
    others = ["notes.txt", "ckpt-best.index", "ckpt-1_temp_mine/x", "logs/events"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    for step in range(7):
        save(tmp_path, step, keep=2)
    assert all((tmp_path / name).read_text() == "precious" for name in others)


def test_a_step_saved_again_replaces_the_former(tmp_path):
    for step, value in [(10, 1.0), (20, 2.0), (10, 3.0)]:
        path = save(tmp_path, step, value)
    assert checkpoint.latest(str(tmp_path)) == path == str(tmp_path / "ckpt-10")
    assert np.all(tf.train.load_checkpoint(path).get_tensor("v") == 3.0)
    names = {name.partition(".")[0] for name in os.listdir(tmp_path)}
    assert names == {"checkpoint", "ckpt-10", "ckpt-20"}


def test_a_directory_may_be_moved(tmp_path):
    (tmp_path / "old").mkdir()
    save(tmp_path / "old", 10, 4.0)
    shutil.move(tmp_path / "old", tmp_path / "new place ü")
    path = checkpoint.latest(str(tmp_path / "new place ü"))
    assert np.all(tf.train.load_checkpoint(path).get_tensor("v") == 4.0)


def test_no_checkpoint_yet(tmp_path):
    assert checkpoint.latest(str(tmp_path)) is None
    assert checkpoint.latest(str(tmp_path / "not there")) is None


def test_where_the_newest_was_removed_the_one_before_is_the_latest(tmp_path):
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "ckpt-20.index").unlink()
    assert checkpoint.latest(str(tmp_path)) == str(tmp_path / "ckpt-10")


@pytest.mark.parametrize("name", ["run[1]", "a\\b"])
def test_a_directory_that_tensorflow_could_not_read_is_refused(name):
    with pytest.raises(UsageError, match="for a pattern; received: model directory"):
        checkpoint.absolute(name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b", "/a/b"),
        ("runs/x*?]{1}", os.path.join(os.getcwd(), "runs/x*?]{1}")),
        ("gs://bucket/dir", "gs://bucket/dir"),
    ],
)
def test_directories_are_made_absolute(path, expected):
    assert checkpoint.absolute(path) == expected


def test_a_directory_that_a_ps_does_not_see_is_named(tmp_path, monkeypatch):
    def fail(**kwargs):
        raise tf.errors.NotFoundError(None, None, "no such directory; or so\nmore")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", fail)
    with pytest.raises(JobError) as error:
        save(tmp_path, 10)
    assert str(tmp_path) in str(error.value)
    assert "a directory that all tasks share" in str(error.value)
    assert "more" not in str(error.value)


# ---- whoever dies during a save --------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(monkeypatch, owner, name, call=1):
    """Dies in the given call of a function, or right after it if negative."""
    function, calls = getattr(owner, name), []

    def dying(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            raise Killed
        result = function(*args, **kwargs)
        if len(calls) == -call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, dying)


DEATHS = {
    "before the first file": (tf.raw_ops, "SaveV2", 1),
    "between two files": (tf.raw_ops, "SaveV2", 2),
    "after all files of the ps": (tf.raw_ops, "SaveV2", 3),
    "after all files": (tf.raw_ops, "SaveV2", -3),
    "before the name exists": (tf.raw_ops, "MergeV2Checkpoints", 1),
    "before it is the latest": (compat, "update_checkpoint_state", 1),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_in_a_save_leaves_the_former_checkpoint(tmp_path, name):
    save(tmp_path, 10, 1.0)
    before = files(tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
        kill_at(monkeypatch, *DEATHS[name])
        save(tmp_path, 20, 2.0)
    path = checkpoint.latest(str(tmp_path))
    assert path == str(tmp_path / "ckpt-10")
    assert np.all(tf.train.load_checkpoint(path).get_tensor("v") == 1.0)
    assert {name: files(tmp_path)[name] for name in before} == before
    # The next life comes to the same step, and cleans up.
    save(tmp_path, 20, 3.0)
    path = checkpoint.latest(str(tmp_path))
    assert np.all(tf.train.load_checkpoint(path).get_tensor("v") == 3.0)
    names = {name.partition(".")[0] for name in os.listdir(tmp_path)}
    assert names == {"checkpoint", "ckpt-10", "ckpt-20"}


def test_a_death_before_old_ones_are_removed_leaves_the_new_one(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, keep=2)
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
        kill_at(monkeypatch, tf.io.gfile, "remove")
        save(tmp_path, 3, 3.0, keep=2)
    path = checkpoint.latest(str(tmp_path))
    assert path == str(tmp_path / "ckpt-3")
    assert np.all(tf.train.load_checkpoint(path).get_tensor("v") == 3.0)


# ---- checkpoints of something else -----------------------------------------------


def refusal(path, values):
    holder = Holder(values)
    with pytest.raises(UsageError) as error:
        checkpoint.restore(path, holder.parts(), [])
    assert all(value is None for value in holder.blocks.values()), "was changed"
    return str(error.value)


def test_another_model_is_refused_with_what_differs(tmp_path):
    saved = {
        "a": np.zeros((4, 2)),
        "b": np.zeros(3),
        "d": np.zeros(3, "float32"),
        "same": np.zeros(1),
    }
    path = checkpoint.save(str(tmp_path), 10, Holder(saved).parts(), {})
    model = {
        "a": np.zeros((4, 3)),
        "c": np.zeros(3),
        "d": np.zeros(3, "int32"),
        "same": np.zeros(1),
    }
    before = files(tmp_path)
    message = refusal(path, model)
    assert path in message
    assert "a has shape [4, 2] instead of [4, 3]" in message
    assert "b is not in the model" in message
    assert "c is missing" in message
    assert "d has dtype float32 instead of int32" in message
    assert "same" not in message
    assert "--model_dir" in message
    assert files(tmp_path) == before


def test_of_many_differences_the_first_four_are_named(tmp_path):
    path = checkpoint.save(str(tmp_path), 10, [], {})
    message = refusal(path, {f"v{i:02}": np.zeros(1) for i in range(12)})
    assert "v03 is missing" in message and "v04" not in message
    assert "and 8 more" in message


def test_a_checkpoint_of_someone_else_is_refused(tmp_path):
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "ckpt"))
    assert checkpoint.latest(str(tmp_path)) == path
    with pytest.raises(
        UsageError, match="that pstrain did not write; received: .*ckpt"
    ):
        checkpoint.read_step(path)


# ---- a training, saved and restored ----------------------------------------------

SLOTS = {
    "adam": (lambda: K.Adam(0.01), ["momentum", "velocity"]),
    "amsgrad with ema": (
        lambda: K.AdamW(0.01, amsgrad=True, use_ema=True),
        ["average", "momentum", "velocity", "velocity_hat"],
    ),
    "rmsprop": (
        lambda: K.RMSprop(0.01, momentum=0.5, centered=True),
        ["average_gradient", "momentum", "velocity"],
    ),
    "ftrl": (lambda: K.Ftrl(0.1), ["accumulator", "linear"]),
    "sgd": (lambda: K.SGD(0.1), []),
}


@pytest.mark.parametrize("name", SLOTS)
def test_every_slot_has_a_key_of_its_own_under_the_path_of_its_variable(name):
    make, expected = SLOTS[name]
    made = blueprint.make(
        lambda: models.click_model(make()),
        models.dataset().element_spec,
        1,
        lambda shape, dtype: [1] * len(shape),
    )
    for variable in made.model.trainable_variables:
        path = made.paths[id(variable)]
        keys = [
            checkpoint._slot_key(variable, slot, path)
            for slot in made.slots[id(variable)]
        ]
        assert sorted(keys) == [f"optimizer/{slot}/{path}" for slot in expected]


def build(learning_rate=0.01, **kwargs):
    return models.click_model(K.Adam(learning_rate), **kwargs)


def same_batch(context=None):
    """One batch for ever: a resumed run reads its data from the start."""
    return models.dataset().take(1).repeat()


def state(trainer):
    """Everything that training changes, by the keys of a checkpoint."""
    trainer.pull()
    trainer._parameters.pull_slots()
    found = {}
    metrics = {id(v) for v in trainer.model.metrics_variables}
    for variable in trainer.model.variables:
        if id(variable) in metrics:
            continue
        name = variable.path
        if variable.name == "seed_generator_state":
            name = "seeds/0"
        found[name] = np.array(whole_value(variable))
        slots = trainer._parameters.slots.get(id(variable), [])
        for slot, kind in zip(slots, ["momentum", "velocity"], strict=False):
            found[f"optimizer/{kind}/{name}"] = np.array(whole_value(slot))
    return found


def assert_same_state(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(found[key], value), key


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a checkpoint of step 10 on 2 ps, and its state."""
    directory = str(tmp_path_factory.mktemp("saved"))
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=directory, **SMALL)
        cut = [p for p in trainer.plan.placements.values() if len(p.blocks) > 1]
        assert [placement.request.path for placement in cut] == [
            "table/embeddings",
            "wide/kernel",
        ]
        trainer.train(10)
        return directory, state(trainer)


@pytest.fixture
def model_dir(saved, tmp_path):
    """A copy of the directory with the checkpoint of step 10."""
    return shutil.copytree(saved[0], tmp_path / "model_dir")


def test_the_keys_are_keras_paths(saved):
    directory, expected = saved
    reader = tf.train.load_checkpoint(directory)
    keys = set(reader.get_variable_to_shape_map())
    others = {"pstrain/global_step", "pstrain/metadata", "optimizer/learning_rate"}
    assert keys == {*expected, *others}
    keras_paths = {variable.path for variable in build().variables}
    generator = {path for path in keras_paths if path.endswith("seed_generator_state")}
    assert {
        k for k in keys if not k.startswith(("optimizer/", "pstrain/", "seeds/"))
    } == (keras_paths - generator)


def test_tensorflow_reads_weights_and_slots_bit_for_bit(saved):
    directory, expected = saved
    reader = tf.train.load_checkpoint(directory)
    for key, value in expected.items():
        assert np.array_equal(reader.get_tensor(key), value), key
    assert reader.get_tensor("pstrain/global_step") == 10
    assert np.any(expected["optimizer/velocity/table/embeddings"])
    assert np.any(expected["norm/moving_mean"])


@pytest.mark.parametrize(
    ("num_ps", "sizes"),
    [
        (1, SMALL),
        (2, SMALL),
        (3, SMALL),
        (3, {**SMALL, "max_shards": 2}),
        (2, {**SMALL, "min_shard_bytes": 50, "max_shards": 5}),
        (2, {}),  # no tables, nothing cut
    ],
)
def test_any_number_of_ps_and_shards_restores_it_bit_for_bit(
    saved, model_dir, num_ps, sizes
):
    with testing.cluster(num_ps=num_ps, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **sizes)
        assert trainer.step == 10
        assert int(trainer.model.optimizer.iterations.numpy()) == 10
        assert_same_state(state(trainer), saved[1])
        # And back: what it writes is what it has read.
        trainer.save()
    reader = tf.train.load_checkpoint(model_dir)
    for key, value in saved[1].items():
        assert np.array_equal(reader.get_tensor(key), value), key


def test_ten_steps_and_ten_more_are_twenty(saved, model_dir):
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, **SMALL)
        trainer.train(20)
        straight = state(trainer)
    with testing.cluster(num_ps=3, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **SMALL)
        trainer.train(20)
        resumed = state(trainer)
    # Dropout went on where it was, or nothing of this would agree.
    assert np.array_equal(resumed.pop("seeds/0"), straight.pop("seeds/0"))
    for key, value in straight.items():
        assert np.allclose(resumed[key], value, atol=1e-6), key
        assert not np.array_equal(resumed[key], saved[1][key]), key
    assert tf.train.latest_checkpoint(model_dir).endswith("ckpt-20")


def test_a_learning_rate_that_was_changed_stays_changed(model_dir):
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **SMALL)
        trainer.model.optimizer.learning_rate = 0.004
        trainer.save()
    with testing.cluster(num_ps=1, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **SMALL)
        assert trainer.learning_rate() == pytest.approx(0.004)


def test_checkpoints_come_every_save_steps_and_at_the_end(tmp_path):
    with testing.cluster(num_ps=2, num_workers=2) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=str(tmp_path), **SMALL)
        trainer.train(25, save_steps=10)
        assert trainer.step == 25
    steps = {int(name[5:-6]) for name in os.listdir(tmp_path) if ".index" in name}
    assert steps == {10, 20, 25}
    for step in steps:
        assert checkpoint.read_step(str(tmp_path / f"ckpt-{step}")) == step


def test_an_error_in_training_saves_what_has_been_done(tmp_path):
    def report(interval):
        if interval.step == 6:
            raise ZeroDivisionError("in the report")

    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=str(tmp_path), **SMALL)
        with pytest.raises(ZeroDivisionError, match="in the report"):
            trainer.train(50, log_steps=3, on_interval=report)
    assert checkpoint.read_step(checkpoint.latest(str(tmp_path))) == 6


OTHER_MODELS = {
    "rows": (
        lambda: build(rows=25),
        "table/embeddings has shape [24, 8] instead of [25, 8]",
    ),
    "optimizer": (
        lambda: models.click_model(K.Adagrad(0.01)),
        "optimizer/accumulator/norm/beta is missing",
    ),
    "fewer slots": (
        lambda: models.click_model(K.SGD(0.01)),
        "optimizer/momentum/norm/beta is not in the model",
    ),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_job_with_another_model_ends_and_leaves_the_directory_alone(model_dir, name):
    other, expected = OTHER_MODELS[name]
    before = files(model_dir)
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        with pytest.raises(UsageError) as error:
            Trainer(other, same_batch, cluster, model_dir=model_dir, **SMALL)
    assert "a checkpoint of another model" in str(error.value)
    assert expected in str(error.value)
    assert files(model_dir) == before


def test_a_job_in_a_directory_of_someone_else_ends(tmp_path):
    tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "ckpt"))
    before = files(tmp_path)
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        with pytest.raises(UsageError, match="that pstrain did not write"):
            Trainer(build, same_batch, cluster, model_dir=str(tmp_path), **SMALL)
    assert files(tmp_path) == before


def test_a_job_that_dies_while_it_saves_goes_on_from_the_one_before(saved, model_dir):
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **SMALL)
        with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(Killed):
            kill_at(monkeypatch, tf.raw_ops, "MergeV2Checkpoints")
            trainer.step = 15
            trainer.save()
    with testing.cluster(num_ps=2, num_workers=1) as cluster:
        trainer = Trainer(build, same_batch, cluster, model_dir=model_dir, **SMALL)
        assert trainer.step == 10
        assert_same_state(state(trainer), saved[1])
