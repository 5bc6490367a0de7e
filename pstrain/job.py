"""One training job, from a list of hosts to an exit code.

`run` is what the coordinator does: wait for the tasks, connect, train with
console lines and TensorBoard summaries, evaluate, save, tell the servers that the
job is over.  `run_local` is the same with the whole cluster in this process.

Whatever ends the job (the last step, Ctrl-C, SIGTERM, an error), a checkpoint is
tried first and the servers are told last, so that no process stays behind.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping

from absl import logging

from pstrain import control, ports, probe, server, watch
from pstrain.cluster import Task
from pstrain.errors import JobError, PstrainError, UsageError
from pstrain.local import LocalCluster
from pstrain.report import Report

FAILURE = 1
# A second signal, or this long after the first one, ends at once.
STOP_TIMEOUT_SECS = 60

# Kept until the process ends: to delete a remote variable or function asks its
# server, and waits for ever for one that hangs.
_kept = []


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """How to train an experiment; see the flags of the same names.

    Attributes:
        last_step: int, global step to end at; None for the experiment's own.
        model_dir: str, where checkpoints and logs go; "" for a new directory
            `runs/<experiment>/<time>`.
        save_steps: int, steps from checkpoint to checkpoint.
        log_steps: int, steps from log line to log line.
        steps_per_dispatch: int, steps that a worker does in one call.
        min_shard_bytes: int, smallest piece into which a variable is cut.
        max_shards: int, most pieces of a variable; None for one a ps.
        seed: int, of the whole run.
        start_timeout_secs: float, how long to wait for the tasks.
        flag_values: mapping from flag to value, for the summary in TensorBoard.
    """

    last_step: int | None = None
    model_dir: str = ""
    save_steps: int = 1000
    log_steps: int = 100
    steps_per_dispatch: int = 10
    min_shard_bytes: int = 256 << 10
    max_shards: int | None = None
    seed: int = 0
    start_timeout_secs: float = 300.0
    flag_values: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run(experiment, cluster, options, *, serve_worker0):
    """Coordinates a job on a cluster of other processes.

    Args:
        experiment: `experiment.Experiment`.
        cluster: `cluster.Cluster`.
        options: `JobOptions`.
        serve_worker0: bool, whether this process is also worker 0, in a cluster
            without a chief.

    Returns:
        The exit code of this process.

    Raises:
        PstrainError: what went wrong, for the user; the servers have been told.
    """
    skip, served = (), None
    if serve_worker0:
        skip = (Task("worker", 0),)
        served = server.start(cluster, skip[0])
    probe.wait_for_tasks(
        cluster, options.start_timeout_secs, log=logging.info, skip=skip
    )
    if cluster.chief is None:
        # Without a chief TensorFlow would call the coordinator "localhost", which
        # a ps on another host could not reach when a checkpoint is written.
        host = cluster.workers[0].rpartition(":")[0]
        chief = f"{host}:{ports.free_ports(1)[0]}"
        cluster = dataclasses.replace(cluster, chief=chief)
    from pstrain import coordinator

    others = [task for task in cluster.tasks() if task not in skip]
    # Connected before anything can go wrong: only so can the servers be told.
    connected = coordinator.connect(
        cluster,
        coordinator.size_partitioner(
            options.min_shard_bytes, options.max_shards or len(cluster.ps)
        ),
    )
    code = FAILURE

    def end_at_once(lost):
        control.stop_servers(cluster, others, FAILURE, "a ps was lost")
        print(f"pstrain: {_lost_sentence(lost)}", file=sys.stderr, flush=True)
        os._exit(FAILURE)

    ps = {str(t): cluster.address(t) for t in others if t.job == "ps"}
    watching = watch.Watch(ps, end_at_once).start()
    control.greet(others, cluster.chief)
    try:
        code = _train(experiment, cluster, options, connected)
    except PstrainError:
        raise
    except Exception as error:
        _raise_if_task_lost(cluster, others, error)
        raise
    finally:
        watching.stop()
        reason = "the job is over" if code == 0 else "the coordinator has ended"
        silent = control.stop_servers(
            cluster, others, code=0 if code != FAILURE else FAILURE, reason=reason
        )
        if silent:
            logging.warning("no answer from %s", ", ".join(map(str, silent)))
        _kept.extend([served, connected])
    return code


def run_local(experiment, options, *, num_ps, num_workers):
    """Runs a job with its whole cluster inside this process.

    Args:
        experiment: `experiment.Experiment`.
        options: `JobOptions`.
        num_ps: int.
        num_workers: int.

    Returns:
        The exit code.
    """
    with LocalCluster(num_ps, num_workers) as local:
        return _train(experiment, local.cluster, options)


def _train(experiment, cluster, options, connected=None):
    """Trains, evaluates and reports on a cluster whose tasks answer."""
    from pstrain.trainer import Trainer

    model_dir = _model_dir(experiment, options)
    last_step = options.last_step
    if last_step is None:
        last_step = experiment.last_step
    with contextlib.closing(Report(f"{model_dir}/logs", last_step)) as report:
        trainer = Trainer(
            experiment.model,
            experiment.train_data,
            cluster,
            model_dir=model_dir,
            seed=options.seed,
            steps_per_dispatch=options.steps_per_dispatch,
            min_shard_bytes=options.min_shard_bytes,
            max_shards=options.max_shards,
            phase=report.phase,
            connected=connected,
        )
        _kept.append(trainer)
        if trainer.step >= last_step:
            logging.info(
                "nothing to do: %s is at step %d and --last_step is %d; give a "
                "larger --last_step or another --model_dir",
                model_dir,
                trainer.step,
                last_step,
            )
            return 0
        _describe(report, experiment, cluster, options, trainer)
        report.phase(f"training from step {trainer.step} to {last_step}")
        with _stop_on_signals(trainer) as received:
            metrics = trainer.train(
                last_step,
                save_steps=options.save_steps,
                log_steps=options.log_steps,
                on_interval=lambda interval: report.interval(
                    interval.step,
                    interval.steps,
                    interval.examples,
                    interval.seconds,
                    interval.metrics,
                    interval.learning_rate,
                ),
            )
            if not received and experiment.eval_data is not None:
                report.phase("evaluating")
                metrics = trainer.evaluate(experiment.eval_data())
                report.evaluation(trainer.step, metrics)
        _conclude(experiment, trainer, metrics, bool(received))
        return 128 + received[0] if received else 0


def _model_dir(experiment, options):
    """The absolute model directory, made; UsageError if it cannot be written."""
    path = options.model_dir
    if not path:
        name = experiment.name.rpartition(".")[2] or "experiment"
        path = os.path.join("runs", name, time.strftime("%Y%m%d-%H%M%S"))
    import tensorflow as tf

    from pstrain import checkpoint

    path = checkpoint.absolute(path)
    try:
        tf.io.gfile.makedirs(path)
        probe_file = f"{path}/.pstrain_write_test"
        with tf.io.gfile.GFile(probe_file, "w") as file:
            file.write("pstrain")
        tf.io.gfile.remove(probe_file)
    except tf.errors.OpError as error:
        raise UsageError(
            f"the model directory cannot be written; received: {path}: "
            f"{error.message}; give another --model_dir"
        ) from error
    return path


def _describe(report, experiment, cluster, options, trainer):
    """The placement in the log; cluster, placement and flags in TensorBoard."""
    for line in trainer.plan.text().splitlines():
        logging.info("place | %s", line)
    hosts = [["task", "address"]]
    hosts += [
        [f"{job} {index}", address]
        for job, addresses in cluster.as_dict().items()
        for index, address in enumerate(addresses)
    ]
    flags = [["flag", "value"], *map(list, sorted(options.flag_values.items()))]
    parameters = [["parameter", "value"]]
    parameters += [[k, str(v)] for k, v in experiment.parameters.items()]
    sections = {
        "Cluster": _markdown(hosts),
        "Placement": f"{_markdown(trainer.plan.rows())}\n\n{trainer.plan.summary()}",
        "Experiment": _markdown(parameters),
        "Flags": _markdown(flags),
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    report.text("job", text, trainer.step)


def _markdown(rows):
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _conclude(experiment, trainer, metrics, stopped):
    """The last lines: where the run ended, how well, and where to look."""
    reference = {}
    if experiment.reference is not None and not stopped:
        reference = experiment.reference()
    reached = []
    for name, value in metrics.items():
        best = f" (best possible {reference[name]:.4f})" if name in reference else ""
        reached.append(f"{name} {value:.4f}{best}")
    logging.info(
        "%s at step %d | %s | checkpoint %s/ckpt-%d | see it: tensorboard --logdir %s",
        "stopped" if stopped else "done",
        trainer.step,
        " | ".join(reached) or "no interval completed",
        trainer.model_dir,
        trainer.step,
        f"{trainer.model_dir}/logs",
    )


@contextlib.contextmanager
def _stop_on_signals(trainer):
    """SIGINT and SIGTERM end the training with a checkpoint; a second one at once.

    Yields:
        List to which the received signal number is added.
    """
    received = []

    def stop(signum, frame):
        if received:
            os._exit(128 + signum)
        received.append(signum)
        logging.info(
            "%s: saving and ending; once more to end at once",
            signal.Signals(signum).name,
        )
        signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signum))
        signal.alarm(STOP_TIMEOUT_SECS)
        trainer.stop()

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise_if_task_lost(cluster, tasks, error):
    """Says which task is gone, if that is why a step failed."""
    lost = []
    for task in tasks:
        try:
            probe.get_status(cluster.address(task))
        except probe.ProbeError as cause:
            lost.append(f"{task} at {cluster.address(task)} ({cause})")
    if lost:
        raise JobError(_lost_sentence(", ".join(lost))) from error


def _lost_sentence(lost):
    return (
        f"the job cannot go on without {lost}; start all tasks again with the same "
        "--model_dir, to go on from the last checkpoint"
    )
