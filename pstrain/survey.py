"""What one training step does with each variable, found out before placing any.

The step is traced once on placeholders: nothing runs and nothing is allocated.
The trace tells which large variables are only looked up by rows (they become
tables on the ps), which are read whole (they are packed with the small ones),
which get a gradient, which are assigned in the forward pass, and how many random
numbers each seed generator draws.  What cannot be trained on parameter servers
is refused here, by name, before any server is touched.
"""

import dataclasses

import tensorflow as tf

from pstrain import compat
from pstrain.errors import UsageError
from pstrain.scope import StepScope
from pstrain.table import table_of

SEED_STATE = "seed_generator_state"


@dataclasses.dataclass
class Survey:
    """The variables of a model by what a training step does with them.

    Each list keeps the order of `model.variables`.

    Attributes:
        tables: looked up by rows only, and large.
        dense: read whole, with a gradient.
        state: without a gradient, assigned in the forward pass (statistics).
        frozen: read whole, never changed.
        seeds: states of `keras.random.SeedGenerator`s.
        metrics: states of the loss tracker and of metrics.
        trained: set of `id(variable)` of those that get a gradient.
        draws: dict from `id(seed variable)` to draws of one step.
    """

    tables: list
    dense: list
    state: list
    frozen: list
    seeds: list
    metrics: list
    trained: set
    draws: dict


class _SurveyScope(StepScope):
    """A step scope that notes what it is asked for and answers with zeros."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read_whole_ids = set()

    def fetch_rows(self, variable, unique):
        table = table_of(variable)
        return tf.zeros([tf.size(unique), table.shape[1]], table.dtype)

    def read_whole(self, variable):
        self.read_whole_ids.add(id(variable))
        leaf = self._leaves[id(variable)].handle
        return tf.zeros(table_of(variable).shape, leaf.dtype) + leaf


def survey(model, element_spec):
    """Traces one training step of a built model.

    Args:
        model: a compiled and built `keras.Model`.
        element_spec: structure of `tf.TensorSpec`, one batch of training data.

    Returns:
        A `Survey`.

    Raises:
        UsageError: the step cannot be run on parameter servers.
    """
    large = [v for v in model.variables if table_of(v) is not None]
    values = [v for v in known_variables(model) if table_of(v) is None]
    gradients = GradientCollector(model)
    scopes = []

    @tf.function(input_signature=[element_spec], autograph=False)
    def trace(data):
        mapping = [(v, tf.identity(compat.backend_value(v))) for v in values]
        trained = [v for v in model.trainable_variables if table_of(v) is None]
        scope = _SurveyScope(mapping, tables=large, trained=trained)
        scopes.append(scope)
        with scope, compat.instance_attributes(model.optimizer, apply=gradients.apply):
            model.train_step(data)
        compat.clear_losses(model)

    trace.get_concrete_function()
    gradients.check()
    return _sort(model, scopes[-1], gradients)


def known_variables(model):
    """Every variable a step of `model` may touch, each once."""
    optimizer = model.optimizer
    found = [
        *model.variables,
        *model.metrics_variables,
        compat.iterations_variable(optimizer),
        compat.learning_rate_variable(optimizer),
    ]
    return list({id(v): v for v in found if v is not None}.values())


def _sort(model, scope, gradients):
    metrics = {id(v) for v in model.metrics_variables}
    trained = gradients.ids
    result = Survey([], [], [], [], [], [], trained, {})
    for variable in model.variables:
        key = id(variable)
        whole = key in scope.read_whole_ids
        if key in metrics:
            continue
        if variable.name == SEED_STATE:
            result.seeds.append(variable)
            result.draws[key] = scope.assigned.get(key, 0)
        elif table_of(variable) is not None and not whole:
            result.tables.append(variable)
        elif key in trained:
            result.dense.append(variable)
        elif key in scope.assigned:
            result.state.append(variable)
        else:
            result.frozen.append(variable)
        if key in trained and key in scope.assigned:
            raise UsageError(
                "a trained variable is also assigned in the forward pass, which "
                f"parameter servers cannot order; received: {variable.path}; make "
                "it non-trainable, or keep the layer out of the model"
            )
    result.metrics = list(model.metrics_variables)
    return result


class GradientCollector:
    """Stands in for `optimizer.apply` while a `train_step` is traced.

    Attributes:
        gradients: dict from `id(variable)` to its gradient.
        ids: set of `id(variable)` with a gradient.
    """

    def __init__(self, model):
        """Starts empty."""
        self.gradients = {}
        self._model = model
        self._calls = 0

    @property
    def ids(self):
        """The variables that got a gradient."""
        return set(self.gradients)

    def apply(self, grads, trainable_variables=None):
        """What `keras.optimizers.Optimizer.apply` is called with."""
        self._calls += 1
        if trainable_variables is None:
            trainable_variables = self._model.trainable_variables
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if gradient is not None:
                self.gradients[id(variable)] = gradient

    def check(self):
        """Refuses a step that does not update once.

        Raises:
            UsageError: naming the model.
        """
        model = self._model
        if self._calls != 1 or not self.gradients:
            raise UsageError(
                "a training step must apply gradients exactly once, with the "
                f"compiled optimizer; received: {self._calls} calls of "
                f"{type(model.optimizer).__name__}.apply with "
                f"{len(self.gradients)} gradients in "
                f"{type(model).__name__}.train_step"
            )
