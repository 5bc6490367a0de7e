import os
import signal
import sys
import textwrap

import pytest
from waiting import alive, wait_until

import pstrain.testing
from pstrain import errors, processes
from pstrain.testing import ProcessCluster


def count_steps(cluster, num_steps=20, fail=False):
    """A job: counts steps on the last ps, by all workers; the count."""
    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.as_dict()), task_type="chief", task_id=0
        )
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counters = [tf.Variable(0, dtype=tf.int64) for _ in cluster.ps]

    @tf.function
    def step():
        counters[-1].assign_add(1)
        if fail:
            tf.debugging.assert_less(counters[-1].read_value(), tf.int64.min)

    for _ in range(num_steps):
        coordinator.schedule(step)
    coordinator.join()
    assert counters[-1].device.startswith(
        f"/job:ps/replica:0/task:{len(cluster.ps) - 1}"
    )
    return counters[-1].numpy()


def test_clusters_of_many_sizes_one_after_the_other():
    for num_ps, num_workers in [(2, 2), (2, 2), (1, 1), (3, 8), (1, 2), (2, 2)]:
        with pstrain.testing.cluster(num_ps, num_workers) as cluster:
            assert (len(cluster.ps), len(cluster.workers)) == (num_ps, num_workers)
            assert count_steps(cluster) == 20


@pytest.mark.parametrize("num_ps", [2, 1])
def test_a_failed_step_does_not_disturb_the_next_cluster(num_ps):
    import tensorflow as tf

    with pstrain.testing.cluster(2, 2) as cluster:
        with pytest.raises(tf.errors.InvalidArgumentError):
            count_steps(cluster, fail=True)
    with pstrain.testing.cluster(num_ps, 2) as cluster:
        assert count_steps(cluster) == 20


def test_two_clusters_at_a_time_are_refused(cluster):
    with pytest.raises(errors.UsageError, match="one cluster at a time"):
        with pstrain.testing.cluster(1, 1):
            pass


@pytest.mark.parametrize(("num_ps", "num_workers"), [(0, 1), (1, 0), (1, 1000)])
def test_impossible_sizes(num_ps, num_workers):
    with pytest.raises(errors.UsageError, match=f"num_ps={num_ps}, num_w"):
        with pstrain.testing.cluster(num_ps, num_workers):
            pass


# ProcessCluster, with a program that needs no TensorFlow.

ECHO = """
    import os, signal, sys, time
    job, index = (arg.partition("=")[2] for arg in sys.argv[1:3])
    print("I am", job, index, *sys.argv[5:], os.environ.get("COLOUR"))
    print("not UTF-8: \\xff".encode("latin1").decode("latin1"), file=sys.stderr)
    if "--end" in sys.argv:
        sys.exit(4)
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "echo.py"
    path.write_text(textwrap.dedent(ECHO))
    return [sys.executable, str(path)]


def test_process_cluster(program, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    with ProcessCluster(
        1, 2, chief=True, program=program, flags=["--a=1"], env={"COLOUR": "red"}
    ) as cluster:
        names = ["ps 0", "worker 0", "worker 1", "chief 0"]
        assert [str(task) for task in cluster.tasks] == names
        chief = f"--chief_host={cluster.cluster.chief}"
        for name in names:
            line = cluster.wait_for_output(name, "I am")
            assert line == f"I am {name} {chief} --a=1 red"
        pid = cluster.pid("worker 1")
        cluster.kill("worker 1")
        assert cluster.wait(10, ["worker 1"]) == {"worker 1": 137}
        cluster.restart("worker 1", flags=["--b=2"])
        assert "--a=1 --b=2 red" in cluster.wait_for_output("worker 1", "I am")
        assert cluster.pid("worker 1") != pid
        with pytest.raises(ValueError, match="worker 0 is running"):
            cluster.start("worker 0")
        for task in cluster.tasks:
            cluster.kill(task, signal.SIGTERM)
        assert cluster.wait(10) == dict.fromkeys(names, 143)
        assert cluster.output("ps 0").count("\n") == 1
    assert cluster._group.running() == []


def test_process_cluster_says_what_it_did_not_get(program):
    with ProcessCluster(1, 1, program=program, start=False) as cluster:
        cluster.start("ps 0")
        cluster.wait_for_output("ps 0", "not UTF-8")
        with pytest.raises(
            errors.JobError, match="'hello' within 0.1 s\n.*\nI am ps 0"
        ):
            cluster.wait_for_output("ps 0", "hello", 0.1)
        with pytest.raises(errors.JobError, match="ended within 0.1 s\n.*\nI am ps 0"):
            cluster.wait(0.1)
        cluster.start("worker 0", flags=["--end"])
        with pytest.raises(errors.JobError, match="ended with exit code 4 and did not"):
            cluster.wait_for_output("worker 0", "hello")


def test_nothing_is_left_of_a_session():
    """Children of a task end with it, and do not hold up the news of its end."""
    with processes.ProcessGroup() as group:
        group.start("parent", ["sh", "-c", "sleep 600 & echo $!"])
        line, ended = group.next_event(10), group.next_event(10)
        assert ended == processes.Ended("parent", 0)
        wait_until(lambda: not alive(line.text))


def test_start_of_a_missing_program():
    with processes.ProcessGroup() as group:
        with pytest.raises(FileNotFoundError):
            group.start("a", ["/no/such/program"])
        assert group.running() == []


def test_environment_finds_pstrain_from_anywhere(tmp_path):
    env = processes.task_environment(PYTHONSAFEPATH="1")
    code = "import pstrain; print(pstrain.__file__)"
    with processes.ProcessGroup() as group:
        os.chdir(tmp_path)
        group.start("a", [sys.executable, "-c", code], env)
        assert group.next_event(20).text == pstrain.__file__
