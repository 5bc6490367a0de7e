"""The command line: usage errors, help, and how fast they answer."""

import os
import socket
import subprocess
import sys

import pytest

HOSTS = ["--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2"]
EXPERIMENT = """
import pstrain

def experiment(*, size=3, rate=0.5, deep=True, name="x", widths=(1, 2)):
    raise RuntimeError(f"{size!r} {rate!r} {deep!r} {name!r} {widths!r}")
"""


def run(*flags, **environ):
    # -X importtime would be slow; a module that cannot be imported is as good.
    env = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | environ
    return subprocess.run(
        [sys.executable, "-m", "pstrain", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )


@pytest.fixture
def no_tensorflow(tmp_path):
    """Environment in which importing TensorFlow or Keras fails."""
    for name in ("tensorflow", "keras"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported too early')")
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}


USAGE = {
    "unknown job": (["--job_name=foo", *HOSTS], "received: 'foo'"),
    "no cluster": (["--job_name=ps"], "needs to know the cluster"),
    "no job": (HOSTS, "--job_name is missing"),
    "index": (["--job_name=ps", "--task_index=7", *HOSTS], "received: ps 7"),
    "unknown flag": (["--nope"], "'nope'"),
    "not a number": (["--last_step=x"], "--last_step=x"),
    "negative": (["--save_steps=-1"], "--save_steps=-1"),
    "argument": (["train"], "flags begin with --"),
    "local and cluster": (["--job_name=ps", "--num_ps=2", *HOSTS], "--num_ps is for"),
    "evaluator": (["--job_name=evaluator", *HOSTS], "evaluator is not there yet"),
    "no experiment": (["--experiment=nope.nope"], "received: 'nope.nope'"),
    "no file": (["--experiment=nope.py"], "received: 'nope.py'"),
    "model_dir": (["--model_dir=/dev/null/x"], "cannot be written"),
    "set": (["--set", "nope=1"], "'nope'"),
    "set form": (["--set", "nope"], "takes name=value"),
    "set type": (["--set", "batch_size=many"], "type int; received: 'many'"),
}


@pytest.mark.parametrize("name", USAGE)
def test_a_usage_error_is_one_sentence_before_tensorflow(name, no_tensorflow):
    flags, message = USAGE[name]
    result = run(*flags, **no_tensorflow)
    assert result.returncode == 2
    assert result.stderr.startswith("pstrain: ")
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


def test_bad_tf_config_is_a_usage_error(no_tensorflow):
    result = run(TF_CONFIG="{", **no_tensorflow)
    assert (result.returncode, "not JSON" in result.stderr) == (2, True)


def test_help_shows_the_commands_and_only_our_flags(no_tensorflow):
    result = run("--help", **no_tensorflow)
    assert result.returncode == 0
    assert "--job_name=ps     --task_index=1" in result.stdout
    assert "--steps_per_dispatch" in result.stdout
    assert "alsologtostderr" not in result.stdout


def test_a_flagfile_is_read(tmp_path, no_tensorflow):
    (tmp_path / "flags").write_text("--job_name=foo\n" + "\n".join(HOSTS))
    result = run(f"--flagfile={tmp_path}/flags", **no_tensorflow)
    assert "received: 'foo'" in result.stderr


def test_settings_have_the_types_of_the_parameters(tmp_path, no_tensorflow):
    path = tmp_path / "mine.py"
    path.write_text(EXPERIMENT)
    settings = ["size=1_000", "rate=2", "deep=no", "name=5", "widths=8,0.5"]
    flags = [f for setting in settings for f in ("--set", setting)]
    result = run(f"--experiment={path}", *flags, **no_tensorflow)
    assert result.returncode == 2
    assert "RuntimeError: 1000 2.0 False '5' (8, 0.5)" in result.stderr
    assert "mine.py:5" in result.stderr


def test_an_unknown_setting_lists_the_known_ones(tmp_path, no_tensorflow):
    path = tmp_path / "mine.py"
    path.write_text(EXPERIMENT)
    result = run(f"--experiment={path}", "--set", "wide=1", **no_tensorflow)
    assert "size=3, rate=0.5, deep=True" in result.stderr


BROKEN = {
    "fails on import": ("1 / 0", "ZeroDivisionError: division by zero"),
    "syntax": ("def :", "SyntaxError"),
    "no function": ("x = 1", "no function 'experiment'"),
    "returns nothing": ("def experiment(): pass", "must return a pstrain.Experiment"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_experiment_shows_its_own_error(name, tmp_path, no_tensorflow):
    text, message = BROKEN[name]
    path = tmp_path / "mine.py"
    path.write_text(text)
    result = run(f"--experiment={path}", **no_tensorflow)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_taken_port_names_port_and_role():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        hosts = [f"--ps_hosts=127.0.0.1:{port}", "--worker_hosts=127.0.0.1:2"]
        result = run("--job_name=ps", *hosts)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("pstrain: ")
    assert str(port) in last
    assert "ps 0" in last
