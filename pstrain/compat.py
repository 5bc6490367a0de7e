"""Every private name of Keras and TensorFlow that pstrain uses, each in one place.

Keras 3 has no public way to intercept a table lookup, to tell a gradient tape
that a stand-in was read, or to know the initializer of a variable while it is
being created; TensorFlow none to give each worker an input of its own.  What is
needed is wrapped here, under a name that says what it does, with the version
that was read: TensorFlow 2.21, Keras 3.15.  `tests/test_compat.py` fails by name
when one of them moves, and `check_versions` says so before a run starts.
"""

import contextlib
import inspect
import itertools

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.optimizers import base_optimizer
from keras.src.utils import naming
from tensorflow.python.distribute import input_lib
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.eager import tape as tape_lib

TESTED_TENSORFLOW = "2.21"
TESTED_KERAS = "3.15"


def check_versions():
    """Returns a sentence about untested versions, or None when all are tested."""
    found = {"tensorflow": tf.__version__, "keras": keras.__version__}
    tested = {"tensorflow": TESTED_TENSORFLOW, "keras": TESTED_KERAS}
    moved = [
        f"{name} {found[name]} (tested: {tested[name]})"
        for name in found
        if found[name].rsplit(".", 1)[0] != tested[name]
    ]
    return f"untested versions: {', '.join(moved)}" if moved else None


# ---- keras.Variable ----------------------------------------------------------


def backend_value(variable):
    """The object that a `keras.Variable` holds: a `tf.Variable` or a `Table`."""
    return variable._value


def set_backend_value(variable, value):
    """Makes a `keras.Variable` hold `value` from now on."""
    variable._value = value


def initializer_of(initial_value):
    """What is behind the callable that Keras gives `tf.Variable`.

    `keras.Variable._initialize_with_initializer` (Keras 3.15) passes a lambda
    that closes over `initializer` and `self`; the shape is nowhere else.

    Returns:
        `(initializer, shape tuple, variable path)`, or None for any other value.
    """
    if not callable(initial_value):
        return None
    names = inspect.getclosurevars(initial_value).nonlocals
    owner = names.get("self")
    if "initializer" not in names or not isinstance(owner, keras.Variable):
        return None
    return names["initializer"], tuple(owner._shape), owner.path


# ---- lookups ------------------------------------------------------------------

_keras_take = keras_numpy.take


def install_take_hook(hook):
    """Routes `keras.ops.take(variable, ids, axis=0)` through `hook` first.

    Args:
        hook: `hook(variable, ids)` returns the rows, or `NotImplemented` for
            every variable that is not its own.
    """

    def take(x, indices, axis=None):
        if axis == 0 and isinstance(x, keras.Variable):
            rows = hook(x, indices)
            if rows is not NotImplemented:
                return rows
        return _keras_take(x, indices, axis)

    keras_numpy.take = take


def stateless_scope():
    """The innermost active `keras.StatelessScope`, or None."""
    return get_stateless_scope()


# ---- gradient tapes -------------------------------------------------------------

_leaf_numbers = itertools.count()


class Leaf:
    """A tensor that gradient tapes treat as a variable they saw being read.

    `tape.gradient(loss, keras_variable)` asks for `keras_variable.value.handle`;
    inside a scope that value is a tensor, so the tensor gets itself as `handle`.
    """

    trainable = True

    def __init__(self, tensor):
        """Wraps `tensor`, a float tensor of the current graph."""
        tensor.handle = tensor
        self.handle = tensor
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._unique_id = f"pstrain_leaf_{next(_leaf_numbers)}"

    def notify_tapes(self):
        """Tells every active tape that the tensor has been read."""
        tape_lib.variable_accessed(self)


# ---- models ---------------------------------------------------------------------


def restart_layer_names():
    """Lets automatic layer names count from the start again."""
    naming.reset_uids()


def build_model(model, element_spec):
    """Creates every variable of a compiled model, its losses and its metrics.

    The optimizer's slots are left to `build_slots`, which knows where they go.

    Args:
        model: a compiled `keras.Model`, built or not.
        element_spec: structure of `tf.TensorSpec`, one batch of training data.
    """
    with instance_attributes(model.optimizer, build=lambda variables: None):
        model._symbolic_build(data_batch=element_spec)


def clear_losses(model):
    """Forgets the `add_loss` terms that tracing left behind in the layers."""
    model._clear_losses()


# ---- optimizers -----------------------------------------------------------------


def key_variables_by_id(optimizer, variables):
    """Lets `optimizer` find its slots by the Keras variable, not its tf.Variable.

    The TensorFlow backend keys slots, and what is excluded from weight decay, by
    `variable.value._unique_id`, which a tensor inside a stateless scope lacks.

    Args:
        optimizer: an unbuilt `keras.optimizers.Optimizer`.
        variables: list of `keras.Variable`, all that it is to train.
    """
    # Decided while the keys are Keras's own, and by the name of the tf.Variable,
    # which is the path of the Keras one.
    decays = {id(v): optimizer._use_weight_decay(backend_value(v)) for v in variables}
    object.__setattr__(optimizer, "_exclude_from_weight_decay_cache", decays)
    object.__setattr__(optimizer, "_var_key", id)


def add_slot(optimizer, *args, **kwargs):
    """`Optimizer.add_variable_from_reference` without the strategy's colocation."""
    return base_optimizer.BaseOptimizer.add_variable_from_reference(
        optimizer, *args, **kwargs
    )


def moving_averages(optimizer):
    """Dict from `id(variable)` to its slot of `use_ema`; empty without it."""
    if not optimizer.use_ema:
        return {}
    averages = optimizer._model_variables_moving_average
    variables = optimizer._trainable_variables
    return {id(v): slot for v, slot in zip(variables, averages, strict=True)}


def iterations_variable(optimizer):
    """The counter of steps, unlike `optimizer.iterations` always a variable."""
    return optimizer._iterations


def learning_rate_variable(optimizer):
    """The learning rate's variable, or None when it is a schedule or a callable."""
    value = optimizer._learning_rate
    return value if isinstance(value, keras.Variable) else None


def clip_gradients(optimizer, gradients):
    """Clips a list of gradients (one a variable) as the optimizer is set to."""
    return optimizer._clip_gradients(gradients)


def decays(optimizer, variable):
    """Whether the optimizer applies its `weight_decay` to this variable."""
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)


# ---- per-worker input --------------------------------------------------------------


def per_worker_iterators(coordinator, dataset_fns):
    """One iterator a worker, each over its own dataset.

    `ClusterCoordinator.create_per_worker_dataset` (TensorFlow 2.21) runs the
    same function on every worker and tells each that it is pipeline 0 of 1.
    A restarted worker runs its own function again.

    Args:
        coordinator: `tf.distribute.coordinator.ClusterCoordinator`.
        dataset_fns: list of `tf.function` without arguments that return a
            `tf.data.Dataset`, one a worker, all of one element spec.

    Returns:
        A per-worker value to pass to `coordinator.schedule`.
    """
    remote = []
    for worker, fn in zip(coordinator._cluster.workers, dataset_fns, strict=True):
        concrete = fn.get_concrete_function()
        iterator = worker.create_resource(lambda concrete=concrete: iter(concrete()))
        iterator._type_spec = input_lib.get_iterator_spec_from_dataset(
            coordinator.strategy, concrete.structured_outputs
        )
        remote.append(iterator)
    return coordinator_values.PerWorkerValues(tuple(remote))


# ---- checkpoints -------------------------------------------------------------------


def update_checkpoint_state(directory, newest, all_paths):
    """Rewrites the file `checkpoint`; paths are relative to `directory`.

    The public `tf.train.CheckpointManager` can only register what it saved itself.
    """
    tf.__internal__.train.update_checkpoint_state(
        directory, newest, all_model_checkpoint_paths=all_paths
    )


# ---- any object ----------------------------------------------------------------------


@contextlib.contextmanager
def instance_attributes(obj, **attributes):
    """Overrides methods on one Keras object for the time of a trace.

    `object.__setattr__` passes by Keras's attribute tracking, so nothing stays.
    """
    for name, value in attributes.items():
        object.__setattr__(obj, name, value)
    try:
        yield
    finally:
        for name in attributes:
            object.__delattr__(obj, name)
