"""pstrain: parameter-server training for Keras 3 on TensorFlow's own runtime.

The names below are imported when first used, so that `import pstrain` and the
command line's `--help` do not wait for TensorFlow.
"""

import importlib

_PUBLIC = {
    "Cluster": "pstrain.cluster",
    "Experiment": "pstrain.experiment",
    "InputContext": "pstrain.data",
    "JobError": "pstrain.errors",
    "LocalCluster": "pstrain.local",
    "PstrainError": "pstrain.errors",
    "Trainer": "pstrain.trainer",
    "UsageError": "pstrain.errors",
}

__version__ = "0.1.0"
__all__ = sorted(_PUBLIC)


def __getattr__(name):
    """Imports a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'pstrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__():
    """The public names."""
    return __all__
