"""The two ways a run can end badly, and the exit code of each.

Everything a user can cause or must act upon is raised as one of these; the
command line prints its sentence without a traceback and exits with its code.
Any other exception is a bug in pstrain or in the user's own model, and keeps
its traceback.
"""


class PstrainError(Exception):
    """Base of the errors whose message is written for the user."""

    exit_code = 1


class UsageError(PstrainError, ValueError):
    """A mistake in flags, hosts, TF_CONFIG, experiment or model; exit code 2."""

    exit_code = 2


class JobError(PstrainError, RuntimeError):
    """A run that could not start or go on (missing task, taken port); exit code 1."""

    exit_code = 1
