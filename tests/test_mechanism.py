"""How a step works, whatever its numbers: what is read, where, and what is sent."""

import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys

import graphs
import keras
import models
import pytest

from pstrain import processes, testing
from pstrain.step import control_vector
from pstrain.table import table_of
from pstrain.trainer import Trainer

K = keras.optimizers
MEASURED_JOB = [
    sys.executable,
    str(pathlib.Path(__file__).resolve().parent / "measured_job.py"),
]
NUM_PS = 2
SMALL = {"min_table_bytes": 700, "min_shard_bytes": 300}


def model(optimizer=None, num_tables=2, num_layers=3):
    """Tables and dense layers, nothing that takes a square root but Adam."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int32", name="ids")
    x = keras.Input((5,), name="x")
    flat = keras.layers.Flatten()
    tables = [
        flat(keras.layers.Embedding(models.ROWS, models.WIDTH, name=f"table_{i}")(ids))
        for i in range(num_tables)
    ]
    h = keras.layers.Concatenate()([*tables, x])
    for i in range(num_layers):
        h = keras.layers.Dense(16, "relu", name=f"dense_{i}")(h)
    made = keras.Model({"ids": ids, "x": x}, keras.layers.Dense(1, name="out")(h))
    made.compile(optimizer or K.Adam(0.01), "mse")
    return made


class Traced:
    """The steps of a placed model; nothing of it refers to the cluster.

    Attributes:
        devices: dict from the name of a `tf.Variable` to its device.
        tables: list of dicts of one table: its `shards` and `slots`, lists of names.
        offsets: dict from the name of a first shard to the offsets of all.
        flats: list of lists of names, a packed buffer and its slots.
        training, evaluation: lists of `graphs.Operation`.
    """

    def __init__(self, cluster, build):
        trainer = Trainer(build, models.dataset, cluster, **SMALL)
        self.variables = {"updates": trainer._applied.updates}
        self._name_tables(trainer._parameters)
        self._name_flats(trainer._parameters)
        iterator, control = iter(models.dataset()), control_vector(0, 1, 0.1)
        function = trainer._functions.train
        step = function.get_concrete_function(iterator, control)
        self.training = graphs.operations(step, self.variables)
        function = trainer._functions.evaluate_function(models.dataset().element_spec)
        step = function.get_concrete_function()
        self.evaluation = graphs.operations(step, self.variables)
        self.devices = {name: v.device for name, v in self.variables.items()}
        del self.variables

    def _name_tables(self, parameters):
        self.tables, self.offsets = [], {}
        for variable in parameters.tables:
            names = []
            for owner in [variable, *parameters.slots[id(variable)]]:
                whole = table_of(owner)
                shards = {f"{owner.path} {i}": s for i, s in enumerate(whole.shards)}
                self.variables.update(shards)
                names.append(list(shards))
                self.offsets[names[-1][0]] = whole.offsets
            self.tables.append({"shards": names[0], "slots": names[1:]})

    def _name_flats(self, parameters):
        self.flats = []
        for number, flat in enumerate(
            [*parameters.dense, *parameters.state, *parameters.frozen]
        ):
            buffers = {
                f"flat {number} {kind}": buffer
                for kind, buffer in enumerate([flat.buffer, *flat.slots])
            }
            self.variables.update(buffers)
            self.flats.append(list(buffers))

    def shards(self):
        """Names of all shards of tables."""
        return [name for table in self.tables for name in table["shards"]]

    def slots(self):
        """Names of all shards of slots."""
        return [name for table in self.tables for s in table["slots"] for name in s]


def uses(found, names):
    """What operations do with variables, as sets of types by name."""
    types = collections.defaultdict(set)
    for operation in found:
        for name in operation.variables & set(names):
            types[name].add(operation.type)
    return types


@pytest.fixture(scope="module")
def traced():
    """The steps of a model with two tables, four dense layers and Adam."""
    with testing.cluster(num_ps=NUM_PS, num_workers=1) as cluster:
        return Traced(cluster, model)


# ---- what a step reads, and where it updates ---------------------------------------


def test_a_step_gathers_and_scatters_rows_and_never_reads_a_table(traced):
    shards, slots = traced.shards(), traced.slots()
    assert (len(shards), len(slots)) == (2 * NUM_PS, 2 * 2 * NUM_PS)
    assert uses(traced.training, [*shards, *slots]) == {
        **dict.fromkeys(shards, {"ResourceGather", "ResourceScatterAdd"}),
        **dict.fromkeys(slots, {"ResourceGather", "ResourceScatterUpdate"}),
    }


def test_an_evaluation_step_gathers_rows_and_changes_nothing(traced):
    buffers = [names[0] for names in traced.flats]
    assert uses(traced.evaluation, traced.devices) == {
        **dict.fromkeys(traced.shards(), {"ResourceGather"}),
        **dict.fromkeys(buffers, {"ReadVariableOp"}),
    }


def test_whatever_touches_a_variable_runs_on_the_ps_that_holds_it(traced):
    touched = set()
    for operation in [*traced.training, *traced.evaluation]:
        for name in operation.variables:
            assert operation.device == traced.devices[name], operation
            touched.add(name)
    assert touched == set(traced.devices)


def test_the_optimizer_computes_on_the_ps_and_the_model_on_the_worker(traced):
    tasks = collections.defaultdict(set)
    for operation in traced.training:
        tasks[operation.type].add(graphs.task(operation.device))
    assert tasks["Sqrt"] == {"ps 0", "ps 1"}  # Adam's
    assert tasks["MatMul"] == tasks["Relu"] == tasks["ReluGrad"] == {"worker"}
    assert tasks["Unique"] == {"worker"}  # ids are made distinct before they travel


def test_a_step_ends_after_all_of_its_updates(traced):
    updates = {
        operation
        for operation in traced.training
        if operation.variables and re.search("Assign|Scatter", operation.type)
    }
    # Every shard and buffer with its two slots, and the count of updates.
    assert len(updates) == 3 * (2 * NUM_PS + NUM_PS) + 1
    counts = [
        operation
        for operation in traced.training
        if operation.type == "AddV2" and updates <= graphs.before(operation)
    ]
    assert counts, "the count of steps does not wait for the updates"


def test_slots_live_with_their_shard(traced):
    for table in traced.tables:
        shards = table["shards"]
        devices = [traced.devices[name] for name in shards]
        assert len(set(devices)) == NUM_PS
        assert len(table["slots"]) == 2
        for slot in table["slots"]:
            assert [traced.devices[name] for name in slot] == devices
            assert traced.offsets[slot[0]] == traced.offsets[shards[0]]


def test_dense_variables_and_their_slots_are_one_buffer_each_on_a_ps(traced):
    assert len(traced.flats) == NUM_PS
    devices = [{traced.devices[name] for name in names} for names in traced.flats]
    assert [len(names) for names in traced.flats] == [3] * NUM_PS
    assert all(len(found) == 1 for found in devices)
    assert len(set.union(*devices)) == NUM_PS


@pytest.mark.parametrize(
    ("name", "writes"),
    [
        ("SGD", {"ResourceScatterAdd"}),
        ("Adagrad", {"ResourceScatterAdd", "ResourceScatterUpdate"}),
        ("Ftrl", {"ResourceScatterAdd", "ResourceScatterUpdate"}),
    ],
)
def test_other_optimizers_update_rows_too(name, writes):
    def build():
        return model(getattr(K, name)(0.1), num_tables=1, num_layers=1)

    with testing.cluster(num_ps=NUM_PS, num_workers=1) as cluster:
        found = Traced(cluster, build)
    names = [*found.shards(), *found.slots()]
    types = uses(found.training, names)
    assert set(types) == set(names)
    assert set.union(*types.values()) == {"ResourceGather", *writes}


# ---- how many messages -------------------------------------------------------------


def messages(num_layers, num_tables):
    """What crosses between tasks in a step, as `graphs.messages`."""

    def build():
        return model(num_layers=num_layers, num_tables=num_tables)

    with testing.cluster(num_ps=NUM_PS, num_workers=1) as cluster:
        return graphs.messages(Traced(cluster, build).training)


def test_messages_of_a_step_do_not_grow_with_the_number_of_layers(traced):
    few = graphs.messages(traced.training)
    assert messages(num_layers=12, num_tables=2) == few
    for ps in ("ps 0", "ps 1"):
        # One update; for each table which rows are asked for.
        assert few["worker", ps, "data"] == 1 + 2
        # One buffer; for each table its rows.
        assert few[ps, "worker", "data"] == 1 + 2


def test_nothing_crosses_between_ps(traced):
    ends = {frozenset(key[:2]) for key in graphs.messages(traced.training)}
    assert ends == {frozenset({"worker", "ps 0"}), frozenset({"worker", "ps 1"})}


def test_a_table_more_is_a_message_more_each_way():
    few = messages(num_layers=1, num_tables=1)
    many = messages(num_layers=1, num_tables=4)
    for ps in ("ps 0", "ps 1"):
        assert many["worker", ps, "data"] - few["worker", ps, "data"] == 3
        assert many[ps, "worker", "data"] - few[ps, "worker", "data"] == 3


# ---- measured, in processes of their own -----------------------------------------


def reports(output):
    """The lines of `measured_job.report` in an output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def network_namespace():
    """A command that gives a process a network of its own, or None."""
    for command in (["unshare", "-n"], ["unshare", "-rn"]):
        if shutil.which(command[0]):
            run = subprocess.run([*command, "true"], capture_output=True, timeout=60)
            if run.returncode == 0:
                return command
    return None


def test_bytes_of_a_step_do_not_depend_on_the_size_of_the_table():
    namespace = network_namespace()
    if namespace is None:
        pytest.skip("this machine does not permit a network namespace (unshare -n)")
    run = subprocess.run(
        [*namespace, *MEASURED_JOB, "--network", "--sizes=2000,200000", "--columns=16"],
        env=processes.task_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    small, large = reports(run.stdout)
    assert (small["rows"], large["rows"]) == (2000, 200_000)
    assert small["bytes"] > 64 * (16 + 1) * 4, "less than the rows of a batch"
    assert large["bytes"] < 1.2 * small["bytes"]
    assert large["bytes"] < 2000 * 16 * 4, "more than the small table"


def test_memory_of_the_coordinator_does_not_depend_on_the_size_of_the_table():
    # The first one warms up; the last one has 512 MB, twice on the ps with its slot.
    flags = ["--sizes=20000,20000,2000000", "--columns=64"]
    with testing.ProcessCluster(
        num_ps=1, num_workers=1, chief=True, flags=flags, program=MEASURED_JOB
    ) as cluster:
        codes = cluster.wait(deadline_secs=120)
        output = cluster.output("chief 0")
    assert set(codes.values()) == {0}, output
    _, small, large = reports(output)
    assert (small["rows"], large["rows"]) == (20_000, 2_000_000)
    assert large["growth"] - small["growth"] < 50 << 20
