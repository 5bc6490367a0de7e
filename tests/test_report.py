"""What a run prints, exactly, and what TensorBoard reads back."""

import io
import logging as std_logging

import tensorflow as tf
from absl import logging
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pstrain.report import Report

METRICS = {"loss": 0.41234, "auc": 0.75}


def interval(report, step=200):
    report.interval(step, 100, 25_600, 0.5, METRICS, learning_rate=0.01)


def lines_of(action):
    """The messages that `action` logs."""
    logged = []
    handler = std_logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.get_absl_logger().addHandler(handler)
    logging.set_verbosity(logging.INFO)
    try:
        action()
    finally:
        logging.get_absl_logger().removeHandler(handler)
    return logged


def test_a_log_file_gets_one_line_an_interval(tmp_path):
    report = Report(str(tmp_path), 1000, interactive=False)
    (line,) = lines_of(lambda: interval(report))
    assert line == (
        "train | step 200/1000 | 200 steps/s | 51,200 examples/s | loss 0.4123 | "
        "auc 0.75 | eta 4 s"
    )


def test_a_terminal_gets_one_line_that_changes(tmp_path):
    out = io.StringIO()
    report = Report(str(tmp_path), 1000, out=out, interactive=True)
    interval(report, step=500)
    interval(report, step=600)
    report.close()
    assert out.getvalue().count("\r") == 2
    assert out.getvalue().count("\n") == 1
    assert "[==========          ] train | step 500/1000" in out.getvalue()


def test_a_phase_tells_the_time_since_the_start(tmp_path):
    times = iter([10.0, 12.5])
    report = Report(str(tmp_path), 10, interactive=False, clock=lambda: next(times))
    (line,) = lines_of(lambda: report.phase("building the model"))
    assert line == "   2.5 s | building the model"


def test_tensorboard_reads_scalars_and_text_at_the_global_step(tmp_path):
    report = Report(str(tmp_path), 1000, interactive=False)
    report.text("job", "## Cluster", 0)
    interval(report)
    report.evaluation(200, {"auc": 0.7})
    report.close()
    train = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0})
    train.Reload()
    assert set(train.Tags()["tensors"]) == {
        "job",
        "loss",
        "auc",
        "learning_rate",
        "steps_per_sec",
        "examples_per_sec",
    }
    (rate,) = train.Tensors("steps_per_sec")
    assert (rate.step, float(tf.make_ndarray(rate.tensor_proto))) == (200, 200.0)
    evaluated = EventAccumulator(str(tmp_path / "eval"), size_guidance={"tensors": 0})
    evaluated.Reload()
    assert [e.step for e in evaluated.Tensors("auc")] == [200]
