"""The command line: every flag, and the choice of what this process is.

Flags are read here and nowhere else.  Everything that can be wrong with them is
found before TensorFlow is imported, and said in one sentence.

Exit codes: 0 done, 1 failure, 2 usage, 128 + n ended by signal n.
"""

import logging as std_logging
import os
import sys

from absl import flags, logging

from pstrain import cluster as cluster_lib
from pstrain import experiment as experiment_lib
from pstrain.errors import PstrainError, UsageError

USAGE = """Trains a Keras model on parameter servers.

Without flags: a whole cluster on this machine, and the default experiment.
  python -m pstrain

A cluster of four commands (worker 0 also coordinates; add the same flags of your
experiment to all):
  hosts="--ps_hosts=a:2222,b:2222 --worker_hosts=c:2222,d:2222"
  python -m pstrain $hosts --job_name=ps     --task_index=0     # on a
  python -m pstrain $hosts --job_name=ps     --task_index=1     # on b
  python -m pstrain $hosts --job_name=worker --task_index=0     # on c
  python -m pstrain $hosts --job_name=worker --task_index=1     # on d
With --chief_host=e:2222 on all, a fifth command --job_name=chief coordinates.
"""

_CLUSTER = {
    "job_name": flags.DEFINE_string(
        "job_name",
        None,
        "What this process is: ps, worker, chief (also called coordinator) or "
        "evaluator. Without it: a whole cluster within this process.",
    ),
    "task_index": flags.DEFINE_integer(
        "task_index", None, "Its number within its job, from 0."
    ),
    "ps_hosts": flags.DEFINE_string(
        "ps_hosts", "", "Comma-separated host:port of the parameter servers."
    ),
    "worker_hosts": flags.DEFINE_string(
        "worker_hosts", "", "Comma-separated host:port of the workers."
    ),
    "chief_host": flags.DEFINE_string(
        "chief_host", "", "host:port of the coordinator; empty: worker 0 coordinates."
    ),
    "start_timeout_secs": flags.DEFINE_float(
        "start_timeout_secs", 300.0, "How long to wait for all tasks.", lower_bound=0
    ),
}
_LOCAL = {
    "num_ps": flags.DEFINE_integer(
        "num_ps", 2, "Parameter servers of the cluster within this process.", 1
    ),
    "num_workers": flags.DEFINE_integer(
        "num_workers", 2, "Workers of the cluster within this process.", 1, 32
    ),
}
_TRAINING = {
    "experiment": flags.DEFINE_string(
        "experiment", "experiments.ctr", "What to train: a module or a Python file."
    ),
    "set": flags.DEFINE_multi_string(
        "set", [], "name=value, a parameter of the experiment; may be repeated."
    ),
    "last_step": flags.DEFINE_integer(
        "last_step", None, "Global step to end at; default: the experiment's.", 0
    ),
    "model_dir": flags.DEFINE_string(
        "model_dir",
        "",
        "Directory of checkpoints and logs, the same for all tasks; a run goes on "
        "from the last checkpoint there. Default: a new one under runs/.",
    ),
    "save_steps": flags.DEFINE_integer(
        "save_steps", 1000, "Steps from checkpoint to checkpoint.", 1
    ),
    "log_steps": flags.DEFINE_integer(
        "log_steps", 100, "Steps from log line to log line.", 1
    ),
    "steps_per_dispatch": flags.DEFINE_integer(
        "steps_per_dispatch", 10, "Steps that a worker does in one call.", 1
    ),
    "min_shard_bytes": flags.DEFINE_integer(
        "min_shard_bytes", 256 << 10, "Smallest piece a variable is cut into.", 1
    ),
    "max_shards": flags.DEFINE_integer(
        "max_shards", None, "Most pieces of a variable; default: one for each ps.", 1
    ),
    "seed": flags.DEFINE_integer(
        "seed", 0, "Seed of initial values, dropout and data.", 0, (1 << 31) - 1
    ),
}
_HELP = flags.DEFINE_bool("help", False, "Shows this.", short_name="h")
_HELPFULL = flags.DEFINE_bool("helpfull", False, "Shows the flags of all libraries.")
_GROUPS = {"The cluster": _CLUSTER, "Within one process": _LOCAL, "Training": _TRAINING}


def main():
    """Runs this process; does not return."""
    try:
        argv = flags.FLAGS(sys.argv)
        if _HELP.value or _HELPFULL.value:
            print(flags.FLAGS.get_help() if _HELPFULL.value else _help())
            _exit(0)
        if argv[1:]:
            raise UsageError(
                f"flags begin with --; received: {' '.join(argv[1:])!r}; see --help"
            )
        code = _run()
    except PstrainError as error:
        print(f"pstrain: {_one_line(error)}", file=sys.stderr)
        code = error.exit_code
    except flags.Error as error:
        print(f"pstrain: {_one_line(error)}; see --help", file=sys.stderr)
        code = UsageError.exit_code
    except KeyboardInterrupt:
        print("pstrain: interrupted", file=sys.stderr)
        code = 130
    except Exception:
        logging.exception("the run has failed")
        code = 1
    _exit(code)


def _exit(code):
    """Ends at once: a normal exit would wait for tasks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _one_line(error):
    return " ".join(str(error).split())


def _run():
    value = flags.FLAGS.flag_values_dict()
    found = cluster_lib.resolve(
        value["job_name"],
        value["task_index"],
        value["ps_hosts"],
        value["worker_hosts"],
        value["chief_host"],
        os.environ,
    )
    _check_combination(found)
    _quiet_environment()
    if found is None:
        return _run_local()
    cluster, task = found
    if task.job == "evaluator":
        raise UsageError(
            "the evaluator is not there yet; received: --job_name=evaluator; the "
            "coordinator evaluates at the end of the training"
        )
    os.environ["TF_CONFIG"] = cluster.tf_config(task)
    if task == cluster.coordinator_task:
        return _run_coordinator(cluster, task)
    from pstrain import server

    _import_tensorflow()
    return server.serve(cluster, task)


def _check_combination(found):
    """Flags that mean nothing together."""
    if found is not None:
        for name in _LOCAL:
            if flags.FLAGS[name].present:
                raise UsageError(
                    f"--{name} is for a cluster within one process; received: it "
                    "together with a cluster; the host lists say how many there are"
                )
    elif flags.FLAGS["task_index"].present:
        raise UsageError(
            "--task_index needs --job_name and the host lists; received: "
            f"--task_index={flags.FLAGS.task_index}"
        )
    experiment_lib.find(flags.FLAGS.experiment)
    _check_writable(flags.FLAGS.model_dir)


def _check_writable(model_dir):
    """A local model directory must be one, or its nearest parent be writable."""
    if not model_dir or "://" in model_dir:
        return
    path = os.path.abspath(model_dir)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(
            f"the model directory cannot be written; received: {model_dir!r} ({path} "
            "is not a writable directory); give another --model_dir"
        )


def _set_up_logging():
    """One line an event, on stderr, with the time before it."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(std_logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    # TensorFlow tells a lost task in 180 lines, and a coordinator's settings in 20.
    handler.addFilter(lambda record: "/tensorflow/" not in record.pathname)
    std_logging.getLogger("tensorflow").setLevel(std_logging.ERROR)


def _quiet_environment():
    """Keeps TensorFlow's banners out of a user's view; what is set stays."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def _import_tensorflow():
    """Imports TensorFlow without the lines it prints before it can be told not to."""
    logging.info("starting TensorFlow")
    sys.stderr.flush()
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        import tensorflow  # noqa: F401
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def _load():
    """The experiment and the options of the job, from the flags."""
    from pstrain import job

    experiment = experiment_lib.load(flags.FLAGS.experiment, flags.FLAGS.set)
    names = [name for name in _TRAINING if name not in ("experiment", "set")]
    given = {
        name: str(flags.FLAGS[name].value)
        for group in _GROUPS.values()
        for name in group
        if flags.FLAGS[name].present
    }
    options = job.JobOptions(
        **{name: flags.FLAGS[name].value for name in names},
        start_timeout_secs=flags.FLAGS.start_timeout_secs,
        flag_values=given,
    )
    return experiment, options


def _run_coordinator(cluster, task):
    from pstrain import job

    experiment, options = _load()
    _import_tensorflow()
    return job.run(experiment, cluster, options, serve_worker0=task.job == "worker")


def _run_local():
    from pstrain import job

    experiment, options = _load()
    _import_tensorflow()
    return job.run_local(
        experiment,
        options,
        num_ps=flags.FLAGS.num_ps,
        num_workers=flags.FLAGS.num_workers,
    )


def _help():
    lines = [USAGE]
    for title, group in _GROUPS.items():
        lines.append(f"{title}:")
        for name in group:
            flag = flags.FLAGS[name]
            default = f" [{flag.default}]" if flag.default not in (None, "", []) else ""
            lines.append(f"  --{name}{default}\n      {flag.help}")
        lines.append("")
    lines.append("--flagfile=FILE reads flags from a file; --helpfull shows all flags.")
    return "\n".join(lines)


if __name__ == "__main__":
    _set_up_logging()
    main()
