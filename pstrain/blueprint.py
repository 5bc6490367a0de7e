"""From a model function to everything that must be known before placing it.

A blueprint is made on the coordinator without a cluster: the model is built with
its large variables as tables that have no values yet, one step is surveyed, the
optimizer's slots are created, and a plan says which ps gets what.  `--explain`
prints a blueprint, a trainer executes it.
"""

import dataclasses

import keras

from pstrain import compat, lookup, optimizer, plan, table
from pstrain.errors import UsageError
from pstrain.survey import Survey, survey
from pstrain.table import table_of


@dataclasses.dataclass
class Blueprint:
    """A built model and where its variables are to live.

    Attributes:
        model: the compiled and built `keras.Model`.
        survey: what a step does with its variables.
        slots: dict from `id(variable)` to the optimizer's variables beside it.
        plan: the `plan.Plan`.
        paths: dict from `id(variable)` to its path, unique in the model.
    """

    model: keras.Model
    survey: Survey
    slots: dict
    plan: plan.Plan
    paths: dict


def make(model_fn, element_spec, num_ps, partitioner, min_table_bytes=None):
    """Builds the model and plans its placement.

    Args:
        model_fn: callable without arguments that returns a compiled
            `keras.Model`.
        element_spec: structure of `tf.TensorSpec`, one batch of training data.
        num_ps: int.
        partitioner: see `plan.make`.
        min_table_bytes: int, smallest variable that may become a table; None
            for `table.MIN_TABLE_BYTES`.

    Returns:
        A `Blueprint`.

    Raises:
        UsageError: something in the model cannot be trained on parameter servers.
    """
    lookup.install()
    # Checkpoints are keyed by path: the same model must get the same names, also
    # when it is built a second time in one process.
    compat.restart_layer_names()
    with table.creation_scope(min_table_bytes or table.MIN_TABLE_BYTES):
        model = model_fn()
        _check_compiled(model)
        optimizer.check(model.optimizer)
        compat.build_model(model, element_spec)
    compat.key_variables_by_id(model.optimizer, model.trainable_variables)
    surveyed = survey(model, element_spec)
    _settle_tables(model, surveyed)
    slots = optimizer.build_slots(model.optimizer, model.trainable_variables)
    paths = _unique_paths(model.variables)
    requests = _requests(surveyed, slots, paths)
    return Blueprint(
        model, surveyed, slots, plan.make(requests, num_ps, partitioner), paths
    )


def _check_compiled(model):
    if not isinstance(model, keras.Model):
        raise UsageError(
            "the model function must return a keras.Model; received: "
            f"{type(model).__name__}"
        )
    if getattr(model, "optimizer", None) is None:
        raise UsageError(
            "the model must be compiled with an optimizer and a loss; received: "
            f"{type(model).__name__} {model.name!r}; call model.compile(...) in the "
            "model function"
        )


def _settle_tables(model, surveyed):
    """Keeps as tables what is looked up by rows; the rest gets local values."""
    tables = {id(variable) for variable in surveyed.tables}
    for variable in model.variables:
        whole = table_of(variable)
        if whole is not None and id(variable) not in tables:
            compat.set_backend_value(variable, whole.materialize())
    for variable in surveyed.tables:
        whole, constraint = table_of(variable), variable.constraint
        shape = whole.shape.as_list()
        table.initial.check(whole.initializer, shape, whole.dtype, variable.path)
        if constraint is not None and not optimizer.acts_on_rows(constraint):
            raise UsageError(
                "a constraint that mixes the rows of a table cannot be applied to "
                "the rows of one step; received: "
                f"{type(constraint).__name__} on {variable.path}; use axis=1"
            )


def _requests(surveyed, slots, paths):
    requests = []
    for kind in plan.KINDS:
        for variable in getattr(surveyed, "tables" if kind == "table" else kind):
            requests.append(
                plan.Request(
                    path=paths[id(variable)],
                    kind=kind,
                    shape=tuple(variable.shape),
                    dtype=variable.dtype,
                    num_slots=len(slots.get(id(variable), [])),
                    whole=kind != "table" and variable.constraint is not None,
                )
            )
    return requests


def _unique_paths(variables):
    """The Keras path of every variable, numbered where two are the same."""
    seen, paths = {}, {}
    for variable in variables:
        count = seen[variable.path] = seen.get(variable.path, 0) + 1
        paths[id(variable)] = variable.path + (f"__{count}" if count > 1 else "")
    return paths
