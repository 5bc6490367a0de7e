"""Metrics of many workers, summed without a race.

A worker starts every pack with fresh metric states and returns how they changed.
The states of Keras metrics are sums (of losses, of examples, of counts in bins),
so the changes of all packs of an interval add up to what one process would have
counted; the result then comes from the metric's own `result()`.
"""

import numpy as np


class MetricSums:
    """Adds up the vectors that `step.StepFunctions` return.

    Attributes:
        examples: int, examples since the last `reset`.
    """

    def __init__(self, model, variables):
        """Takes the model and its metric variables in the order of the vectors."""
        self._model = model
        self._variables = variables
        self._size = 1 + sum(int(np.prod(v.shape)) for v in variables)
        self.reset()

    def reset(self):
        """Starts a new interval."""
        self._sum = np.zeros(self._size, np.float64)

    @property
    def examples(self):
        """How many examples the interval holds."""
        return int(self._sum[0])

    def add(self, vector):
        """Adds the result of one pack."""
        self._sum += vector

    def results(self):
        """The interval's metrics as a flat dict from name to float."""
        model = self._model
        model.reset_metrics()
        offset = 1
        for variable in self._variables:
            size = int(np.prod(variable.shape))
            change = self._sum[offset : offset + size].reshape(variable.shape)
            variable.assign(variable.numpy() + change.astype(variable.dtype))
            offset += size
        return dict(_flatten(model.get_metrics_result()))


def _flatten(results, prefix=""):
    for name, value in results.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}_")
        elif np.ndim(value) == 0:
            yield prefix + name, float(value)
        else:
            yield prefix + name, float(np.mean(value))
