import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from waiting import alive, wait_until

from pstrain import processes

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, str(ROOT / "tools" / "launch.py")]
TINY_JOB = f"{sys.executable} {ROOT / 'tests' / 'tiny_job.py'}"

# Stands for `python -m pstrain`: behaves as the flags after `--` say, where the
# file `over` is the coordinator's word to the servers that the job is over.
STAND_IN = """
    import argparse, os, pathlib, signal, sys, time

    parser = argparse.ArgumentParser()
    for flag in ("ps_hosts", "worker_hosts", "chief_host", "job_name", "task_index"):
        parser.add_argument(f"--{flag}")
    parser.add_argument("--fail", default="none:0")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--run_secs", type=float, default=0)
    options = parser.parse_args()
    name = f"{options.job_name} {options.task_index}"
    coordinates = name == ("chief 0" if options.chief_host else "worker 0")
    folder = pathlib.Path(__file__).parent
    over = folder / "over"
    hosts = [options.ps_hosts, options.worker_hosts, options.chief_host]
    num_tasks = sum(len(text.split(",")) for text in hosts if text)

    def say(text):
        # In one piece, also when a signal comes.
        os.write(1, f"{text}\\n".encode())

    def on_signal(signum, frame):
        say(f"got {signal.Signals(signum).name}")
        if options.stubborn:
            return
        if coordinates:
            say("saved")
            over.touch()
        os._exit(128 + signum)

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    say(f"pid {os.getpid()}")
    (folder / f"{name}.ready").touch()
    task, code = options.fail.split(":")
    if name == task.replace("_", " "):
        while len(list(folder.glob("*.ready"))) < num_tasks:
            time.sleep(0.02)
        print("cannot go on", file=sys.stderr, flush=True)
        os._exit(int(code))
    start = time.monotonic()
    while not over.exists():
        if coordinates and options.run_secs and (
            time.monotonic() - start > options.run_secs
        ):
            over.touch()
        time.sleep(0.02)
"""


class Run:
    """The launcher as a process, with the lines that it prints."""

    def __init__(self, group, argv):
        self.group = group
        self.pid = group.start("launcher", argv, processes.task_environment())
        self.lines = []

    def wait_for(self, condition, deadline_secs=20):
        """Reads on until `condition(lines)`."""
        deadline = time.monotonic() + deadline_secs
        while not condition(self.lines):
            event = self.group.next_event(max(0, deadline - time.monotonic()))
            assert isinstance(event, processes.Line), (event, self.lines)
            self.lines.append(event.text)

    def wait(self, deadline_secs=20):
        """Reads on to the end; the exit code."""
        deadline = time.monotonic() + deadline_secs
        while event := self.group.next_event(max(0, deadline - time.monotonic())):
            if isinstance(event, processes.Ended):
                return event.code
            self.lines.append(event.text)
        pytest.fail(f"the launcher did not end: {self.lines}")

    def pids(self):
        """Process ids of the tasks by name."""
        found = {}
        for line in self.lines:
            name, text = line.split(" | ", 1)
            if text.startswith("pid "):
                found[name.strip()] = int(text.split()[1])
        return found


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher: launch(launcher's flags, stand-in's flags)."""
    program = tmp_path / "stand_in.py"
    program.write_text(textwrap.dedent(STAND_IN))
    with processes.ProcessGroup() as group:
        yield lambda flags, task_flags: Run(
            group,
            [*LAUNCH, f"--program={sys.executable} {program}", *flags, "--"]
            + task_flags,
        )


def test_lines_have_the_task_before_them_and_all_is_well(launch):
    run = launch(["--num_ps=1", "--num_workers=10", "--chief"], ["--run_secs=0.1"])
    assert run.wait() == 0
    assert set(run.pids()) == {"ps 0", "chief 0", *(f"worker {i}" for i in range(10))}
    assert {line.index(" | ") for line in run.lines} == {len("worker 0")}
    assert len(run.lines) == 12


def test_without_chief_worker_0_coordinates(launch):
    run = launch([], ["--run_secs=0.1"])
    assert run.wait() == 0
    assert set(run.pids()) == {"ps 0", "ps 1", "worker 0", "worker 1"}


def test_a_failed_server_ends_the_job_with_its_code(launch):
    run = launch(["--chief"], ["--fail=worker_1:7"])
    assert run.wait() == 7
    assert "worker 1 | cannot go on" in run.lines
    assert "launch   | worker 1 ended with exit code 7" in run.lines
    # The coordinator may save; the servers leave at its word, not by a signal.
    signals = [line for line in run.lines if "got SIG" in line]
    assert signals == ["chief 0  | got SIGINT"]
    assert "chief 0  | saved" in run.lines
    assert not any(map(alive, run.pids().values()))


def test_a_failed_coordinator_ends_the_job_with_its_code(launch):
    run = launch(["--chief"], ["--fail=chief_0:3"])
    run.wait_for(lambda lines: any("ended with exit code 3" in x for x in lines))
    # Servers that nobody tells are ended at once by a second Ctrl-C.
    os.kill(run.pid, signal.SIGINT)
    assert run.wait() == 3
    assert "ps 0     | got SIGTERM" in run.lines


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_goes_to_the_coordinator_alone(launch, signum):
    run = launch([], [])
    run.wait_for(lambda _: len(run.pids()) == 4)
    os.kill(run.pid, signum)
    assert run.wait() == 128 + signum
    signals = [line for line in run.lines if "got SIG" in line]
    assert signals == [f"worker 0 | got {signum.name}"]
    assert "worker 0 | saved" in run.lines
    assert not any(map(alive, run.pids().values()))


def test_ctrl_c_again_and_again_ends_what_does_not_listen(launch):
    run = launch([], ["--stubborn"])
    run.wait_for(lambda _: len(run.pids()) == 4)
    for sign in ("got SIGINT", "got SIGTERM", None):
        os.kill(run.pid, signal.SIGINT)
        if sign:
            run.wait_for(lambda lines, sign=sign: any(sign in x for x in lines))
    assert run.wait() == 130
    assert not any(map(alive, run.pids().values()))


def test_the_grace_of_the_coordinator_is_limited(launch):
    run = launch(["--grace_secs=0.2"], ["--stubborn"])
    run.wait_for(lambda _: len(run.pids()) == 4)
    os.kill(run.pid, signal.SIGINT)
    # Stubborn also at SIGTERM: 0.2 s, 5 s, and SIGKILL.
    assert run.wait() == 130
    assert not any(map(alive, run.pids().values()))


def test_no_task_outlives_a_killed_launcher(launch):
    run = launch([], ["--stubborn"])
    run.wait_for(lambda _: len(run.pids()) == 4)
    pids = run.pids().values()
    assert all(map(alive, pids))
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_ps=0"], "at least 1 ps and 1 worker"),
        (["--num_workers=two"], "invalid int value: 'two'"),
        (["--last_step=5"], "unrecognized arguments: --last_step=5"),
    ],
)
def test_bad_flags(flags, message):
    run = subprocess.run([*LAUNCH, *flags], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert message in run.stderr


def test_help():
    run = subprocess.run(
        [*LAUNCH, "--help"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0
    for text in ("--num_ps", "--chief", "Ctrl-C", "python -m pstrain --help"):
        assert text in run.stdout


def test_a_program_that_is_not_there():
    argv = [*LAUNCH, "--program=/no/such/program"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "/no/such/program" in run.stderr and "Traceback" not in run.stderr


def test_a_job_with_real_servers():
    with processes.ProcessGroup() as group:
        run = Run(group, [*LAUNCH, "--num_ps=1", "--chief", f"--program={TINY_JOB}"])
        assert run.wait(120) == 0
    assert "chief 0  | steps 10" in run.lines
