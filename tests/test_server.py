import json
import os
import pathlib
import signal
import socket
import sys
import time

import pytest

from pstrain import control, errors, ports, server
from pstrain.cluster import Cluster, Task
from pstrain.testing import ProcessCluster

TINY_JOB = [sys.executable, str(pathlib.Path(__file__).parent / "tiny_job.py")]
START_SECS = 120


def tiny_cluster(num_ps=1, num_workers=1, **kwargs):
    return ProcessCluster(num_ps, num_workers, program=TINY_JOB, **kwargs)


def connect(cluster):
    import tensorflow as tf

    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.as_dict()), task_type="chief", task_id=0
        )
    )


# Ports.


def test_free_ports_differ_and_are_free():
    found = ports.free_ports(50)
    assert len(set(found)) == 50
    for port in found:
        ports.require_free(port, Task("ps", 0))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_taken_port_is_an_error_that_names_it(host):
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        cluster = Cluster(ps=("a:1", f"127.0.0.1:{port}"), workers=("b:1",))
        with pytest.raises(errors.JobError, match=f"port {port} is in use.*ps 1") as e:
            server.start(cluster, Task("ps", 1))
    assert e.value.exit_code == 1


def test_port_of_an_ended_connection_is_free():
    """TIME_WAIT, as a killed server leaves it, does not keep it from restarting."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    ports.require_free(port, Task("ps", 0))


# Messages, without a network.


@pytest.fixture
def plane():
    return control.Control(Task("ps", 1))


def test_hello(plane):
    assert plane.handle({"command": "hello"}) == {"task": "ps 1", "pid": os.getpid()}


def test_exit_ends_the_wait_and_the_first_one_counts(plane):
    message = {"command": "exit", "code": 3, "reason": "a\nlong\tstory"}
    assert plane.handle(message)["task"] == "ps 1"
    plane.leave(143, "received SIGTERM")
    assert plane.wait() == (3, "a long story")


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"command": "dance"},
        {"command": "__class__"},
        {"command": ["exit"]},
        {"command": "exit"},
        {"command": "exit", "code": "0", "reason": ""},
        {"command": "exit", "code": 256, "reason": ""},
        {"command": "exit", "code": -1, "reason": ""},
        {"command": "exit", "code": 0, "reason": None},
        "exit",
        None,
    ],
)
def test_other_messages_get_an_error(plane, message):
    assert "ps 1 does not understand" in plane.handle(message)["error"]
    assert plane._exits.empty()


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"\xff", b"[]", b"1", b"{}", b'{"task": ["ps 0"]}', b"__import__('os')"],
)
def test_other_requests_get_an_error(request_bytes):
    assert "error" in json.loads(control._answer(request_bytes))


# Messages, through servers within this process.


def test_each_task_of_a_process_is_told_its_own(cluster):
    strategy = connect(cluster)
    for task in cluster.tasks():
        assert control.call(task, "hello") == {"task": str(task), "pid": os.getpid()}
    with pytest.raises(errors.JobError, match="worker 1 does not understand"):
        control.call(Task("worker", 1), "dance")
    with pytest.raises(errors.JobError, match="ps 7"):
        control.call(Task("ps", 7), "hello")
    missing = control.stop_servers(cluster, [Task("ps", 1), Task("ps", 7)], code=5)
    assert missing == [Task("ps", 7)]
    assert control._controls["ps 1"].wait() == (5, "the job is over")
    assert control._controls["ps 0"]._exits.empty()
    del strategy


def test_a_coordinator_may_know_a_lone_server_by_another_name(monkeypatch):
    monkeypatch.setattr(control, "_controls", {"worker 2": control.Control("worker 2")})
    request = json.dumps({"command": "hello", "task": "worker 1"})
    assert json.loads(control._answer(request))["task"] == "worker 2"


# Servers as processes.


def test_servers_leave_when_the_job_is_over():
    with tiny_cluster(num_ps=2, num_workers=2, chief=True) as cluster:
        cluster.wait_for_output("chief 0", "steps 10", START_SECS)
        assert cluster.wait(30, ["chief 0"]) == {"chief 0": 0}
        start = time.monotonic()
        codes = cluster.wait(30)
        assert time.monotonic() - start < 5
        assert codes == {str(task): 0 for task in cluster.tasks}
        assert "silent\n" in cluster.output("chief 0") + "\n"
        for task in cluster.cluster.tasks():
            address, pid = cluster.cluster.address(task), cluster.pid(task)
            output = cluster.output(task)
            assert f"serve | {task} at {address} | pid {pid}" in output
            assert f"serve | {task} ends: the job is over | exit code 0" in output


def test_a_server_that_hangs_does_not_hold_up_the_others():
    flags = ["--hung=worker 0"]
    with tiny_cluster(num_ps=1, num_workers=2, chief=True, flags=flags) as cluster:
        cluster.wait_for_output("chief 0", "silent worker 0", START_SECS)
        codes = cluster.wait(10, ["ps 0", "worker 1", "chief 0"])
        assert set(codes.values()) == {0}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_with_one_line(signum):
    with tiny_cluster(start=False) as cluster:
        cluster.start("ps 0")
        cluster.wait_for_output("ps 0", "serve | ps 0 at", START_SECS)
        cluster.kill("ps 0", signum)
        start = time.monotonic()
        assert cluster.wait(10) == {"ps 0": 128 + signum}
        assert time.monotonic() - start < 5
        (line,) = cluster.output("ps 0").splitlines()[-1:]
        assert f"ps 0 ends: received {signum.name} | exit code {128 + signum}" in line


def test_a_task_whose_port_is_taken_ends_with_a_sentence():
    with tiny_cluster(start=False) as cluster:
        port = int(cluster.cluster.ps[0].rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            cluster.start("ps 0")
            assert cluster.wait(START_SECS) == {"ps 0": 1}
        (line,) = cluster.output("ps 0").splitlines()
        assert line.startswith(f"port {port} is in use on this host")


def test_a_job_waits_for_the_missing_task_and_then_runs():
    with tiny_cluster(chief=True, start=False) as cluster:
        cluster.start("chief 0")
        cluster.start("worker 0")
        line = cluster.wait_for_output("chief 0", "waiting for 1 of 2", START_SECS)
        assert "ps 0" in line and "worker 0" not in line
        cluster.start("ps 0")
        assert set(cluster.wait(START_SECS).values()) == {0}
