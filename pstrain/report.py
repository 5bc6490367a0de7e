"""What a run tells people: console lines, a progress line, TensorBoard.

One place writes them all, against the global step.  On a terminal a training is
one line that keeps changing; in a log file it is one line an interval.
"""

import sys
import time

from absl import logging


class Report:
    """Writes phases, intervals and evaluations of one run.

    Attributes:
        logdir: str, directory of the TensorBoard files.
        last_step: int, where the run is to end, for the time that is left.
    """

    def __init__(self, logdir, last_step, out=None, interactive=None, clock=None):
        """Opens nothing until there is something to write.

        Args:
            logdir: str.
            last_step: int.
            out: text stream of the progress line; None for stderr.
            interactive: bool, whether `out` is a terminal; None to ask it.
            clock: callable that returns seconds; None for `time.monotonic`.
        """
        self.logdir = logdir
        self.last_step = last_step
        self._out = out or sys.stderr
        self._interactive = self._out.isatty() if interactive is None else interactive
        self._clock = clock or time.monotonic
        self._start = self._clock()
        self._writers = {}
        self._line_open = False

    def phase(self, text):
        """Announces what happens next, before it takes long."""
        self._end_line()
        logging.info("%6.1f s | %s", self._clock() - self._start, text)

    def text(self, tag, markdown, step):
        """Writes a text summary to TensorBoard."""
        import tensorflow as tf

        with self._writer("train").as_default():
            tf.summary.text(tag, markdown, step=step)

    def interval(self, step, steps, examples, seconds, metrics, learning_rate):
        """Reports the training since the last call.

        Args:
            step: int, the global step now.
            steps: int, steps since the last call.
            examples: int, examples since the last call.
            seconds: float, time since the last call.
            metrics: mapping from name to float, over these steps.
            learning_rate: float, now.
        """
        seconds = max(seconds, 1e-9)
        steps_per_sec, examples_per_sec = steps / seconds, examples / seconds
        scalars = {
            **metrics,
            "learning_rate": learning_rate,
            "steps_per_sec": steps_per_sec,
            "examples_per_sec": examples_per_sec,
        }
        self._scalars("train", step, scalars)
        line = " | ".join(
            [
                "train",
                f"step {step}/{self.last_step}",
                f"{steps_per_sec:.0f} steps/s",
                f"{examples_per_sec:,.0f} examples/s",
                *(f"{name} {value:.4g}" for name, value in metrics.items()),
                f"eta {(self.last_step - step) / steps_per_sec:.0f} s",
            ]
        )
        if self._interactive:
            done = min(20, 20 * step // max(1, self.last_step))
            self._out.write(f"\r\033[K[{'=' * done}{' ' * (20 - done)}] {line}")
            self._out.flush()
            self._line_open = True
        else:
            logging.info("%s", line)

    def evaluation(self, step, metrics):
        """Reports an evaluation at a global step."""
        self._end_line()
        self._scalars("eval", step, metrics)
        values = " | ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        logging.info("eval | step %d | %s", step, values)

    def close(self):
        """Ends the progress line and the files."""
        self._end_line()
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _end_line(self):
        if self._line_open:
            self._out.write("\n")
            self._out.flush()
            self._line_open = False

    def _scalars(self, run, step, values):
        import tensorflow as tf

        # Train and eval are two runs with one tag, so TensorBoard overlays them.
        with self._writer(run).as_default():
            for name, value in values.items():
                tf.summary.scalar(name, value, step=step)
        self._writer(run).flush()

    def _writer(self, run):
        import tensorflow as tf

        if run not in self._writers:
            self._writers[run] = tf.summary.create_file_writer(f"{self.logdir}/{run}")
        return self._writers[run]
