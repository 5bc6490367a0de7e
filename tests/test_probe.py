import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest

from pstrain import errors, ports, probe, processes
from pstrain.cluster import Cluster, Task


def status_reply(task, incarnation=7):
    """A `GetStatusResponse` as protobuf writes it, with fields we do not read."""
    name = f"/job:{task.job}/replica:0/task:{task.index}/device:CPU:0".encode()
    device = b"\x0a" + bytes([len(name)]) + name
    device += b"\x12\x03CPU"  # device_type
    device += b"\x20\x80\x80\x80\x80\x01"  # memory_limit: 268435456
    device += b"\x2a\x00"  # locality
    device += b"\x31" + incarnation.to_bytes(8, "little")
    return b"\x0a" + bytes([len(device)]) + device


@contextlib.contextmanager
def fake_server(reply, port=0):
    """Something with a GetStatus method that answers `reply`; yields its address."""
    handlers = grpc.method_handlers_generic_handler(
        "tensorflow.WorkerService",
        {"GetStatus": grpc.unary_unary_rpc_method_handler(lambda *_: reply)},
    )
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handlers])
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def unused_address():
    return f"127.0.0.1:{ports.free_ports(1)[0]}"


def test_status_of_a_real_server(cluster):
    first, second = (probe.get_status(address) for address in cluster.ps)
    assert first.devices == ("/job:ps/replica:0/task:0/device:CPU:0",)
    assert (first.task, second.task) == (Task("ps", 0), Task("ps", 1))
    assert first.incarnation != second.incarnation
    assert first == probe.get_status(cluster.ps[0])


def test_status_is_parsed():
    with fake_server(status_reply(Task("worker", 11), 2**63 + 5)) as address:
        status = probe.get_status(address)
    assert status == probe.Status(
        ("/job:worker/replica:0/task:11/device:CPU:0",), 2**63 + 5
    )
    assert status.task == Task("worker", 11)


def test_proxy_of_the_environment_is_not_used(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{unused_address()}")
    with fake_server(status_reply(Task("ps", 0))) as address:
        assert probe.get_status(address).task == Task("ps", 0)


def test_refused():
    with pytest.raises(probe.ProbeError, match="^connection refused$"):
        probe.get_status(unused_address())


def test_unknown_host():
    with pytest.raises(probe.ProbeError, match="^the host name cannot be resolved$"):
        probe.get_status("no-such-host.invalid:2222")


def test_silence_ends_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(probe.ProbeError, match=r"^no answer within 0\.3 s$"):
            probe.get_status(f"127.0.0.1:{listener.getsockname()[1]}", 0.3)
        assert time.monotonic() - start < 2


def test_web_server():
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(probe.ProbeError, match="something else"):
            probe.get_status(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        b"",  # No devices.
        b"\xff",  # Ends within a number.
        b"\x0a\x50ab",  # Ends within a field.
        b"\x0f",  # No such wire type.
        b"\x0a\x03\x0a\x01x",  # A device without an incarnation.
        b"\x08\x01",  # A number where devices are.
        b"\x0a\x0d\x08\x01\x31" + bytes(8),  # A number for a name.
        status_reply(Task("ps", 0)).replace(b"/", b"\xff"),  # Not UTF-8.
    ],
)
def test_other_replies(reply):
    with fake_server(reply) as address:
        with pytest.raises(probe.ProbeError, match="something else"):
            probe.get_status(address)


def test_needs_no_tensorflow():
    code = "import sys, pstrain.probe; sys.exit('tensorflow' in sys.modules)"
    argv, env = [sys.executable, "-c", code], processes.task_environment()
    assert subprocess.run(argv, env=env, timeout=60).returncode == 0


def test_wait_says_nothing_when_all_answer(cluster):
    lines = []
    probe.wait_for_tasks(cluster, timeout_secs=10, log=lines.append)
    assert lines == []


def test_wait_names_who_is_missing_and_for_how_long():
    with fake_server(status_reply(Task("ps", 0))) as ps:
        dead = unused_address()
        cluster = Cluster(ps=(ps, dead), workers=("no-such-host.invalid:2222",))
        lines = []
        with pytest.raises(errors.JobError) as error:
            probe.wait_for_tasks(cluster, 1.2, log=lines.append, every_secs=0.5)
    missing = (
        rf"ps 1 at {dead} for \d s \(connection refused\); worker 0 at "
        r"no-such-host.invalid:2222 for \d s \(the host name cannot be resolved\)"
    )
    assert lines
    for line in lines:
        assert re.fullmatch(f"waiting for 2 of 3 tasks: {missing}", line)
    assert re.search(f"within 1.2 s; missing: {missing}; start", str(error.value))


def test_wait_goes_on_until_the_last_one_comes():
    late = ports.free_ports(1)[0]
    with (
        fake_server(status_reply(Task("ps", 0))) as ps,
        contextlib.ExitStack() as stack,
    ):
        cluster = Cluster(ps=(ps,), workers=(f"127.0.0.1:{late}",))

        def log(line):
            lines.append(line)
            stack.enter_context(fake_server(status_reply(Task("worker", 0)), late))

        lines = []
        probe.wait_for_tasks(cluster, 30, log=log, every_secs=0.1)
    assert len(lines) == 1 and "worker 0" in lines[0] and "ps 0" not in lines[0]


def test_all_must_answer_at_the_same_time():
    """One that came and died again is missing, since it was seen last."""
    late = ports.free_ports(1)[0]
    with contextlib.ExitStack() as dying:
        ps = dying.enter_context(fake_server(status_reply(Task("ps", 0))))
        cluster = Cluster(ps=(ps,), workers=(f"127.0.0.1:{late}",))
        with fake_server(status_reply(Task("worker", 0))):
            lines = []

            def log(line):
                lines.append(line)
                dying.close()

            with pytest.raises(errors.JobError, match=r"missing: ps 0 .*; worker 0"):
                probe.wait_for_tasks(cluster, 1.5, log=log, every_secs=0.1)
    assert "ps 0" not in lines[0] and "ps 0" in lines[-1]


def test_wait_warns_once_of_swapped_addresses():
    with (
        fake_server(status_reply(Task("worker", 0))) as first,
        fake_server(status_reply(Task("ps", 0))) as second,
    ):
        cluster = Cluster(ps=(first, unused_address()), workers=(second,))
        lines = []
        with pytest.raises(errors.JobError, match="missing: ps 1"):
            probe.wait_for_tasks(cluster, 1.2, log=lines.append)
    assert len(lines) == 2
    assert f"{first} should be ps 0, but answers as worker 0" in lines[0]
    assert f"{second} should be worker 0, but answers as ps 0" in lines[1]


def test_wait_skips():
    with fake_server(status_reply(Task("ps", 0))) as ps:
        cluster = Cluster(ps=(ps,), workers=(unused_address(),))
        probe.wait_for_tasks(cluster, 1, log=pytest.fail, skip=[Task("worker", 0)])
