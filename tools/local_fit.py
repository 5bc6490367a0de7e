#!/usr/bin/env python
"""Trains an experiment in this one process with `model.fit`: no ps, no workers.

    python tools/local_fit.py --experiment=experiments.flights

The number to compare a run on parameter servers with: the same model, optimizer
and data (all of it, as the only worker of one), the same number of steps.
"""

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from pstrain import data, errors  # noqa: E402
from pstrain import experiment as experiment_lib  # noqa: E402


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--experiment",
        default="experiments.ctr",
        metavar="E",
        help="module or file (experiments.ctr)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the experiment; may be repeated",
    )
    parser.add_argument(
        "--last_step", type=int, metavar="N", help="steps (the experiment's own)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (0)")
    options = parser.parse_args(argv)
    if options.last_step is not None and options.last_step < 1:
        parser.error("--last_step must be at least 1")
    return options


def main(argv=None):
    options = parse(argv)
    experiment = experiment_lib.load(options.experiment, options.set)
    steps = options.last_step or experiment.last_step

    import keras

    keras.utils.set_random_seed(options.seed)
    model = experiment.model()
    train_data = experiment.train_data(data.InputContext(seed=options.seed))
    start = time.monotonic()
    # One line in a log, a progress bar on a terminal.
    verbose = 1 if sys.stderr.isatty() else 2
    history = model.fit(
        train_data, steps_per_epoch=steps, shuffle=False, verbose=verbose
    ).history
    secs = time.monotonic() - start
    reached = {name: values[-1] for name, values in history.items()}
    if experiment.eval_data is not None:
        reached = model.evaluate(experiment.eval_data(), verbose=0, return_dict=True)
    best = experiment.reference() if experiment.reference is not None else {}
    texts = [
        f"{name} {value:.4f}" + (f" (best {best[name]:.4f})" if name in best else "")
        for name, value in reached.items()
    ]
    print(f"local fit | {steps} steps in {secs:.0f} s | {' | '.join(texts)}")


if __name__ == "__main__":
    try:
        main()
    except errors.PstrainError as error:
        print(f"tools/local_fit.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
