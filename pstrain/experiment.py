"""An experiment: one Python file that says what to train.

The file defines a function `experiment` with keyword parameters, the things that
`--set name=value` changes, which returns an `Experiment` of factories.  Nothing
in it depends on where it runs: the same file trains in one process, embedded, or
on a cluster.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Mapping

from pstrain.errors import PstrainError, UsageError

FUNCTION = "experiment"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What to train, as functions that are called where they are needed.

    Attributes:
        model: builds and compiles the `keras.Model`; called once, on the
            coordinator.
        train_data: takes an `InputContext`, returns a batched `tf.data.Dataset`
            that usually repeats; called once for each worker.
        eval_data: returns a batched and finite `tf.data.Dataset`, or None.
        last_step: int, the default of `--last_step`.
        reference: returns the best known or possible value by metric name, which
            is printed beside the reached one; or None.
        name: str, filled in by `load`.
        parameters: the parameters in force, filled in by `load`.
    """

    model: Callable
    train_data: Callable
    eval_data: Callable | None = None
    last_step: int = 1000
    reference: Callable | None = None
    name: str = ""
    parameters: Mapping = dataclasses.field(default_factory=dict)


def find(spec):
    """Checks that an experiment exists, without importing it.

    Args:
        spec: str, a module ("experiments.ctr") or a file ("my_model.py").

    Raises:
        UsageError: there is no such file or module.
    """
    if _is_file(spec):
        if not pathlib.Path(spec).is_file():
            raise UsageError(f"there is no such experiment file; received: {spec!r}")
        return
    try:
        found = importlib.util.find_spec(spec)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None:
        raise UsageError(
            f"there is no such experiment; received: {spec!r}; give a module such as "
            "experiments.ctr, or the path of a Python file"
        )


def load(spec, settings=()):
    """Imports an experiment and calls its function with the settings.

    Args:
        spec: str, a module ("experiments.ctr") or a file ("my_model.py").
        settings: list of str, "name=value".

    Returns:
        An `Experiment` with its name and parameters.

    Raises:
        UsageError: it does not exist, fails, or has no such parameter.
    """
    find(spec)
    module = _import(spec)
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise UsageError(
            f"the experiment has no function {FUNCTION!r}; received: {spec!r}; define "
            f"`def {FUNCTION}(*, name=default): return pstrain.Experiment(...)`"
        )
    values = parse_settings(function, settings, spec)
    try:
        result = function(**values)
    except PstrainError:
        raise
    except Exception as error:
        raise UsageError(_failure(spec, "failed when it was called", error)) from error
    if not isinstance(result, Experiment):
        raise UsageError(
            f"the function {FUNCTION!r} must return a pstrain.Experiment; received: "
            f"{type(result).__name__} from {spec!r}"
        )
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }
    name = pathlib.Path(spec).stem if _is_file(spec) else spec
    return dataclasses.replace(result, name=name, parameters={**defaults, **values})


def parse_settings(function, settings, spec):
    """Turns "name=value" texts into keyword arguments of the right types.

    Raises:
        UsageError: an unknown name, or a value of another type.
    """
    parameters = inspect.signature(function).parameters
    known = ", ".join(f"{name}={p.default!r}" for name, p in parameters.items())
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set takes name=value; received: {setting!r}")
        if name not in parameters:
            raise UsageError(
                f"{spec} has no parameter {name!r}; received: --set {setting}; its "
                f"parameters are {known or 'none'}"
            )
        kind = _kind(parameters[name])
        try:
            values[name] = _parse(text, kind)
        except ValueError:
            wanted = getattr(kind, "__name__", kind)
            raise UsageError(
                f"--set {name} takes a value of type {wanted}; received: {text!r}"
            ) from None
    return values


def _kind(parameter):
    """The type of a parameter: its annotation, or that of its default."""
    kind = parameter.annotation
    if isinstance(kind, types.UnionType):
        kind = next(k for k in kind.__args__ if k is not type(None))
    if kind in (int, float, bool, str):
        return kind
    default = parameter.default
    if isinstance(default, tuple):
        return tuple
    return type(default) if isinstance(default, int | float | bool) else str


def _parse(text, kind):
    if kind is bool:
        words = {"true": True, "1": True, "yes": True}
        words |= {"false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    if kind is int:
        return int(text.replace("_", ""))
    if kind is float:
        return float(text)
    if kind is tuple:
        return tuple(_number_or_text(t.strip()) for t in text.split(",") if t.strip())
    return text


def _number_or_text(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _is_file(spec):
    return spec.endswith(".py") or "/" in spec


def _import(spec):
    try:
        if not _is_file(spec):
            return importlib.import_module(spec)
        path = pathlib.Path(spec).resolve()
        # Beside the file may be others that it imports.
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
        return module
    except PstrainError:
        raise
    except Exception as error:
        raise UsageError(_failure(spec, "fails when it is imported", error)) from error


def _failure(spec, what, error):
    """A user's own error in one sentence, with the line where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    return (
        f"the experiment {what}; received: {spec!r}: {type(error).__name__}: "
        f"{error}{place}"
    )
