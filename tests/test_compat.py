"""Every private name of Keras and TensorFlow that pstrain uses, one test each.

A new version that moves one of them fails here by name, not in a training.
"""

import ast
import contextlib
import importlib
import pathlib

import keras
import models
import numpy as np
import pytest
import tensorflow as tf
from waiting import wait_until

import pstrain

K = keras.optimizers
PACKAGE = pathlib.Path(pstrain.__file__).parent

MODULE_NAMES = [
    ("keras.src.backend.common.stateless_scope", "get_stateless_scope"),
    ("keras.src.backend.tensorflow.numpy", "take"),
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
    ("keras.src.utils.naming", "reset_uids"),
    ("tensorflow.python.distribute.input_lib", "get_iterator_spec_from_dataset"),
    ("tensorflow.python.distribute.coordinator.values", "PerWorkerValues"),
    ("tensorflow.python.eager.tape", "variable_accessed"),
]

INSTANCE_NAMES = {
    "a variable": (
        lambda: keras.Variable([1.0]),
        ["_value", "_shape", "_initialize_with_initializer"],
    ),
    "an optimizer": (
        lambda: K.SGD(0.1),
        [
            "_iterations",
            "_learning_rate",
            "_clip_gradients",
            "_use_weight_decay",
            "_trainable_variables",
            "_var_key",
            "update_step",
        ],
    ),
    "a model": (
        lambda: keras.Sequential([keras.layers.Dense(1)]),
        ["_symbolic_build", "_clear_losses", "metrics_variables", "train_step"],
    ),
    "a stateless scope": (
        keras.StatelessScope,
        ["state_mapping", "add_update", "get_current_value"],
    ),
}


@pytest.mark.parametrize(("module", "name"), MODULE_NAMES)
def test_a_private_module_has_its_name(module, name):
    found = importlib.import_module(module)
    assert hasattr(found, name), f"{module}.{name} has moved: adapt pstrain/compat.py"


@pytest.mark.parametrize("kind", INSTANCE_NAMES)
def test_an_object_has_its_private_names(kind):
    make, names = INSTANCE_NAMES[kind]
    missing = set(names) - set(dir(make()))
    assert not missing, f"{kind} of Keras has no {missing}: adapt pstrain/compat.py"


@pytest.fixture
def compat():
    """Imported late: the tests above must run even if it cannot be."""
    from pstrain import compat

    return compat


def private_names(tree):
    """What a module takes from inside of Keras or TensorFlow."""
    owners = {"keras", "tf", "model", "optimizer", "layer", "variable", "slot"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith(("keras.src", "tensorflow.python")):
                yield node.module
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = node.value
            name = getattr(owner, "id", getattr(owner, "attr", "")).lstrip("_")
            if name in owners:
                yield f"{name}.{node.attr}"


def test_no_other_module_uses_private_names():
    # The control channel has one more, and says itself when it is gone.
    allowed = {"control.py": ["tensorflow.python.ops"]}
    for path in sorted(PACKAGE.glob("*.py")):
        if path.name != "compat.py":
            found = list(private_names(ast.parse(path.read_text())))
            assert found == allowed.get(path.name, []), path.name


# ---- versions --------------------------------------------------------------------


def test_the_versions_here_are_the_tested_ones(compat):
    assert compat.check_versions() is None, compat.check_versions()


def test_untested_versions_are_named_in_a_sentence(compat, monkeypatch):
    monkeypatch.setattr(tf, "__version__", "2.99.1")
    assert compat.check_versions() == (
        "untested versions: tensorflow 2.99.1 (tested: 2.21)"
    )
    monkeypatch.setattr(keras, "__version__", "4.0.0")
    assert compat.check_versions().endswith(
        "tensorflow 2.99.1 (tested: 2.21), keras 4.0.0 (tested: 3.15)"
    )


def test_a_patch_release_counts_as_tested(compat, monkeypatch):
    monkeypatch.setattr(tf, "__version__", f"{compat.TESTED_TENSORFLOW}.7")
    monkeypatch.setattr(keras, "__version__", f"{compat.TESTED_KERAS}.9")
    assert compat.check_versions() is None


# ---- variables -------------------------------------------------------------------


def test_backend_value_is_what_a_keras_variable_holds(compat):
    variable = keras.Variable([1.0, 2.0])
    assert isinstance(compat.backend_value(variable), tf.Variable)
    other = tf.Variable([3.0, 4.0])
    compat.set_backend_value(variable, other)
    assert compat.backend_value(variable) is other
    assert variable.value is other
    assert variable.numpy().tolist() == [3.0, 4.0]


def created(compat, make):
    """What `initializer_of` finds for every variable that `make()` creates."""
    found = []

    def create(next_creator, **kwargs):
        found.append(compat.initializer_of(kwargs["initial_value"]))
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        made = make()
    return made, found


@pytest.mark.parametrize("late", [False, True])
def test_the_initializers_of_a_stock_dense_layer_are_found(compat, late):
    def make():
        layer = keras.layers.Dense(4, kernel_initializer="he_normal", name="dense")
        if late:
            keras.Sequential([layer]).build((None, 3))
        else:
            layer.build((None, 3))
        return layer

    layer, found = created(compat, make)
    assert found == [
        (layer.kernel_initializer, (3, 4), layer.kernel.path),
        (layer.bias_initializer, (4,), layer.bias.path),
    ]
    assert isinstance(found[0][0], keras.initializers.HeNormal)


def test_the_initializer_of_a_stock_embedding_is_found(compat):
    def make():
        layer = keras.layers.Embedding(7, 2, name="table")
        layer.build((None,))
        return layer

    layer, found = created(compat, make)
    assert found == [(layer.embeddings_initializer, (7, 2), "table/embeddings")]


def test_an_initializer_that_is_a_function_is_found(compat):
    def initializer(shape, dtype=None):
        return tf.ones(shape, dtype)

    _, found = created(
        compat, lambda: keras.Variable(initializer, (2, 3), "float32", name="v")
    )
    assert found == [(initializer, (2, 3), "v")]


def test_other_initial_values_have_no_initializer(compat):
    initializer = keras.initializers.Zeros()
    others = [
        None,
        np.ones(3),
        tf.ones(3),
        lambda: tf.ones(3),
        lambda: initializer((3,)),
        tf.ones,
    ]
    assert [compat.initializer_of(value) for value in others] == [None] * len(others)
    assert created(compat, lambda: keras.Variable([1.0]))[1] == [None]
    assert created(compat, lambda: tf.Variable([1.0]))[1] == [None]


# ---- lookups ---------------------------------------------------------------------


@pytest.fixture
def hook(compat, monkeypatch):
    """Installs a hook that notes its calls; gives the list of them."""
    calls = []

    def note(variable, ids):
        calls.append((variable, ids))
        return NotImplemented

    monkeypatch.setattr(compat.keras_numpy, "take", compat.keras_numpy.take)
    compat.install_take_hook(note)
    return calls


def test_the_hook_sees_every_lookup_of_a_stock_embedding(compat, hook):
    layer = keras.layers.Embedding(7, 2)
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, layer(ids))
    batch = np.array([[1, 6, 0]], "int32")
    hook.clear()
    expected = layer.embeddings.numpy()[batch]
    assert np.array_equal(layer(batch), expected)
    assert np.array_equal(model(batch), expected)
    assert np.array_equal(tf.function(layer)(batch), expected)
    assert [variable for variable, _ in hook] == [layer.embeddings] * 3, (
        "keras.ops.take no longer goes through keras.src.backend.tensorflow.numpy.take"
    )


def test_the_hook_sees_direct_calls_along_the_first_axis_alone(compat, hook):
    variable = keras.Variable(np.arange(6.0).reshape(3, 2))
    keras.ops.take(variable, [0], axis=0)
    keras.ops.take(variable, [0], axis=1)
    keras.ops.take(variable, [0])
    keras.ops.take(np.ones((3, 2)), [0], axis=0)
    assert len(hook) == 1


def test_what_the_hook_returns_is_the_result(compat, monkeypatch):
    monkeypatch.setattr(compat.keras_numpy, "take", compat.keras_numpy.take)
    compat.install_take_hook(lambda variable, ids: tf.zeros([5]))
    assert keras.ops.take(keras.Variable([1.0]), [0], axis=0).shape == (5,)


def test_the_innermost_stateless_scope_is_found(compat):
    assert compat.stateless_scope() is None
    with keras.StatelessScope() as outer:
        assert compat.stateless_scope() is outer
        with keras.StatelessScope() as inner:
            assert compat.stateless_scope() is inner
        assert compat.stateless_scope() is outer
    assert compat.stateless_scope() is None


# ---- gradient tapes --------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_tapes_take_a_leaf_for_the_variable(compat, wrap):
    variable = keras.Variable([5.0, 6.0])

    class Scope(keras.StatelessScope):
        def get_current_value(self, asked):
            leaf.notify_tapes()
            return super().get_current_value(asked)

    @wrap
    def gradient():
        nonlocal leaf
        leaf = compat.Leaf(tf.constant([1.0, 2.0]))
        scope = Scope([(variable, leaf.handle)])
        with scope, tf.GradientTape() as outer, tf.GradientTape() as inner:
            loss = tf.reduce_sum(variable**2)
        with scope:
            return loss, inner.gradient(loss, variable), outer.gradient(loss, variable)

    leaf = None
    loss, *gradients = gradient()
    assert loss == 5.0
    for found in gradients:
        assert found is not None, "a tape does not watch the stand-in of a variable"
        assert found.numpy().tolist() == [2.0, 4.0]


# ---- models ----------------------------------------------------------------------


def test_automatic_layer_names_start_again(compat):
    compat.restart_layer_names()
    first = keras.layers.Dense(1).name
    assert keras.layers.Dense(1).name != first
    compat.restart_layer_names()
    assert keras.layers.Dense(1).name == first


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([keras.layers.Dense(2)]), Subclassed]
)
def test_a_model_is_built_with_its_metrics_but_without_slots(compat, make):
    model = make()
    model.compile("adam", "mse", metrics=[keras.metrics.F1Score(), "mae"])
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2]))
    compat.build_model(model, spec)
    assert [tuple(v.shape) for v in model.trainable_variables] == [(3, 2), (2,)]
    # The loss, F1Score (three times two classes and a count), the mean error.
    assert sum(int(np.prod(v.shape)) for v in model.metrics_variables) >= 2 + 6 + 2
    assert not model.optimizer.built
    assert "build" not in vars(model.optimizer)


def test_losses_of_layers_are_forgotten(compat):
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_sum(x))
            return x

    model = keras.Sequential([Adds()])
    model(tf.ones([2]))
    assert len(model.losses) == 1
    compat.clear_losses(model)
    assert model.losses == []


# ---- optimizers ------------------------------------------------------------------


def test_an_optimizer_finds_slots_by_the_keras_variable(compat):
    variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
    optimizer = K.SGD(0.1, momentum=0.9)
    compat.key_variables_by_id(optimizer, variables)
    optimizer.build(variables)
    for variable in variables:
        # No tf.Variable any more: what it finds does not depend on the value.
        compat.set_backend_value(variable, object())
    assert [optimizer._get_variable_index(v) for v in variables] == [0, 1]


def model_with_decay(**excluded):
    optimizer = K.AdamW(0.01, weight_decay=0.5)
    model = models.click_model(optimizer)
    layers = excluded.pop("layers", [])
    if layers:
        excluded["var_list"] = [v for n in layers for v in model.get_layer(n).weights]
    if excluded:
        optimizer.exclude_from_weight_decay(**excluded)
    return model


@pytest.mark.parametrize(
    ("excluded", "paths"),
    [
        ({}, set()),
        ({"var_names": ["bias"]}, {"wide/bias", "out/bias"}),
        (
            {"var_names": ["out/", "emb"]},
            {"out/kernel", "out/bias", "table/embeddings"},
        ),
        ({"layers": ["table"]}, {"table/embeddings"}),
        ({"layers": ["wide"]}, {"wide/kernel", "wide/bias"}),
    ],
)
def test_what_is_excluded_from_weight_decay_stays_so(compat, excluded, paths):
    from pstrain import blueprint

    made = blueprint.make(
        lambda: model_with_decay(**excluded),
        models.dataset().element_spec,
        1,
        lambda shape, dtype: [1] * len(shape),
        min_table_bytes=700,
    )
    optimizer = made.model.optimizer
    found = {
        variable.path
        for variable in made.model.trainable_variables
        if not compat.decays(optimizer, variable)
    }
    assert found == paths


def test_without_weight_decay_nothing_decays(compat):
    assert not compat.decays(K.Adam(), keras.Variable([1.0]))


def test_a_slot_is_added_to_the_optimizer_with_name_and_initializer(compat):
    variable = keras.Variable([1.0, 2.0], name="weight")
    optimizer = K.SGD()
    slot = compat.add_slot(optimizer, variable, name="speed", initializer="ones")
    assert optimizer.variables[-1] is slot
    assert slot.name == "weight_speed"
    assert slot.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: K.Adam(amsgrad=True, use_ema=True),
        lambda: K.RMSprop(momentum=0.5, centered=True),
        lambda: K.Ftrl(),
        lambda: K.Adadelta(),
        lambda: K.SGD(momentum=0.9, use_ema=True),
    ],
)
def test_optimizers_add_all_slots_through_the_one_method(compat, make):
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer, added = make(), []

    def add(variable, *args, **kwargs):
        added.append(compat.add_slot(optimizer, variable, *args, **kwargs))
        return added[-1]

    before = optimizer.variables
    compat.key_variables_by_id(optimizer, variables)
    with compat.instance_attributes(optimizer, add_variable_from_reference=add):
        optimizer.build(variables)
    assert added
    assert [id(v) for v in optimizer.variables] == [id(v) for v in [*before, *added]]


def test_moving_averages_are_found_by_their_variable(compat):
    variables = [keras.Variable([1.0], name="a"), keras.Variable([2.0], name="b")]
    optimizer = K.SGD(use_ema=True)
    optimizer.build(variables)
    found = compat.moving_averages(optimizer)
    assert [found[id(v)].name for v in variables] == ["a_average", "b_average"]
    assert compat.moving_averages(K.SGD()) == {}


def test_the_counter_of_steps_is_a_variable(compat):
    optimizer = K.SGD(gradient_accumulation_steps=2)
    counter = compat.iterations_variable(optimizer)
    counter.assign(8)
    assert int(optimizer.iterations) == 4
    plain = K.SGD()
    assert compat.iterations_variable(plain) is plain.iterations


def test_the_learning_rate_is_a_variable_unless_it_follows_a_schedule(compat):
    optimizer = K.SGD(0.25)
    assert compat.learning_rate_variable(optimizer) is optimizer.learning_rate
    assert float(compat.learning_rate_variable(optimizer).numpy()) == 0.25
    schedule = K.schedules.ExponentialDecay(0.1, 10, 0.9)
    for rate in (schedule, lambda: 0.1):
        assert compat.learning_rate_variable(K.SGD(rate)) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[3.0, 4.0], [-12.0]]),
        ({"clipvalue": 3.5}, [[3.0, 3.5], [-3.5]]),
        ({"clipnorm": 2.5}, [[1.5, 2.0], [-2.5]]),
        ({"global_clipnorm": 6.5}, [[1.5, 2.0], [-6.0]]),
    ],
)
def test_gradients_are_clipped_as_the_optimizer_is_set(compat, options, expected):
    gradients = [tf.constant([3.0, 4.0]), tf.constant([-12.0])]
    clipped = compat.clip_gradients(K.SGD(**options), gradients)
    for found, wanted in zip(clipped, expected, strict=True):
        assert np.allclose(found, wanted)


# ---- input of workers ------------------------------------------------------------


def test_every_worker_iterates_over_its_own_dataset(compat, cluster):
    from pstrain import coordinator as coordinator_lib

    coordinator = coordinator_lib.connect(cluster)
    functions = [
        tf.function(lambda n=n: tf.data.Dataset.from_tensors(n).repeat())
        for n in (10, 20)
    ]
    iterators = compat.per_worker_iterators(coordinator, functions)

    @tf.function
    def draw(iterator):
        return next(iterator)

    drawn = set()

    def both():
        values = [coordinator.schedule(draw, args=(iterators,)) for _ in range(20)]
        drawn.update(int(value.fetch()) for value in values)
        return len(drawn) > 1

    wait_until(both)
    assert drawn == {10, 20}


# ---- checkpoints, objects --------------------------------------------------------


def test_a_checkpoint_can_be_registered_that_tensorflow_did_not_save(compat, tmp_path):
    compat.update_checkpoint_state(str(tmp_path), "b-2", ["a-1", "b-2"])
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == str(tmp_path / "b-2")
    assert list(state.all_model_checkpoint_paths) == [
        str(tmp_path / "a-1"),
        str(tmp_path / "b-2"),
    ]


def test_attributes_of_an_instance_are_overridden_for_a_while(compat):
    optimizer = K.SGD()
    with contextlib.suppress(ZeroDivisionError):
        with compat.instance_attributes(optimizer, apply=lambda grads: "mine"):
            assert optimizer.apply([]) == "mine"
            raise ZeroDivisionError
    assert "apply" not in vars(optimizer)
    assert optimizer.apply.__func__ is type(optimizer).apply
