"""Does a task answer, and is it still the one it was?

TensorFlow connects to a cluster without a deadline: with one task missing, the
constructor of the strategy blocks for ever and prints nothing. So the
coordinator first waits here until every task answers, and says which do not.

A probe is one call of the `GetStatus` method that every TensorFlow server has,
made with plain gRPC: it has a real deadline, and needs neither TensorFlow nor a
connection made by it. The answer carries a random incarnation number, drawn
when the server starts. So after a failure: no answer means that the task is
dead or hangs, another incarnation means that it was restarted and lost what it
held.
"""

import concurrent.futures
import dataclasses
import re
import time

import grpc

from pstrain import errors
from pstrain.cluster import Task

_METHOD = "/tensorflow.WorkerService/GetStatus"
_PROBE_TIMEOUT_SECS = 2.0
_PAUSE_SECS = 0.5

_CHANNEL_OPTIONS = (
    # A proxy of the environment is meant for the web, not for cluster hosts.
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each probe. A shared one waits longer and
    # longer after each failure, and would find a task late.
    ("grpc.use_local_subchannel_pool", 1),
)


class ProbeError(errors.PstrainError):
    """An address where no TensorFlow server answered; the message says why."""


@dataclasses.dataclass(frozen=True)
class Status:
    """What a TensorFlow server says of itself.

    Attributes:
        devices: tuple of str, full names: `/job:ps/replica:0/task:1/device:CPU:0`.
        incarnation: int, a random number drawn at the start of the server.
    """

    devices: tuple[str, ...]
    incarnation: int

    @property
    def task(self):
        """The `Task` that the server takes itself for; None if it cannot be told."""
        for device in self.devices:
            if found := re.match(r"/job:(\w+)/replica:\d+/task:(\d+)/", device):
                return Task(found[1], int(found[2]))
        return None


def get_status(address, timeout_secs=_PROBE_TIMEOUT_SECS):
    """Asks the TensorFlow server at `address` for its status.

    Args:
        address: str, `host:port`.
        timeout_secs: float, how long to wait for the answer.

    Returns:
        A `Status`.

    Raises:
        ProbeError: if no TensorFlow server answers; the message is the cause
            alone ("connection refused"), to be put behind the task's name.
    """
    try:
        with grpc.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
            # Without serializers, bytes go out and come back as they are; no
            # bytes are an empty request.
            reply = channel.unary_unary(_METHOD)(b"", timeout=timeout_secs)
        return _parse_status(reply)
    except grpc.RpcError as error:
        raise ProbeError(_cause(error, timeout_secs)) from error
    except (ValueError, IndexError) as error:
        raise ProbeError("something else than a TensorFlow server answers") from error


def wait_for_tasks(cluster, timeout_secs, log=print, every_secs=10.0, skip=()):
    """Returns once every ps and worker answers in one and the same round.

    Args:
        cluster: the `Cluster`.
        timeout_secs: float, how long to wait for all of them.
        log: callable that takes a line: every `every_secs` seconds it gets who is
            missing, for how long and why; and a warning for each address where
            another task answers.
        every_secs: float, the seconds between two lines.
        skip: `Task`s not to wait for.

    Raises:
        JobError: after `timeout_secs`, naming the missing tasks.
    """
    tasks = [task for task in cluster.tasks() if task not in skip]
    if not tasks:
        return
    start = time.monotonic()
    last_seen = dict.fromkeys(tasks, start)
    log_at = start + every_secs
    warned = set()
    with concurrent.futures.ThreadPoolExecutor(min(32, len(tasks))) as pool:
        while True:
            missing = {}
            answers = pool.map(lambda task: _try_status(cluster.address(task)), tasks)
            for task, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, ProbeError):
                    missing[task] = answer
                    continue
                last_seen[task] = time.monotonic()
                if answer.task != task and task not in warned:
                    warned.add(task)
                    log(
                        f"warning: {cluster.address(task)} should be {task}, but "
                        f"answers as {answer.task}; compare the host lists of all "
                        "tasks"
                    )
            if not missing:
                return
            now = time.monotonic()
            text = "; ".join(
                f"{task} at {cluster.address(task)} for {now - last_seen[task]:.0f} s"
                f" ({cause})"
                for task, cause in missing.items()
            )
            if now - start >= timeout_secs:
                raise errors.JobError(
                    f"the job cannot start: not every task answered within "
                    f"{timeout_secs:g} s; missing: {text}; start the missing tasks or "
                    "correct the host lists"
                )
            if now >= log_at:
                log(f"waiting for {len(missing)} of {len(tasks)} tasks: {text}")
                log_at = now + every_secs
            time.sleep(min(_PAUSE_SECS, max(0.0, start + timeout_secs - now)))


def _try_status(address):
    """The status, or the `ProbeError` itself."""
    try:
        return get_status(address)
    except ProbeError as error:
        return error


def _cause(error, timeout_secs):
    """A few words for what gRPC reports in a paragraph."""
    details = error.details() or ""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_secs:g} s"
    if error.code() == grpc.StatusCode.UNIMPLEMENTED or "HTTP/2" in details:
        return "something else than a TensorFlow server answers"
    if "errors resolving" in details or "Domain name not found" in details:
        return "the host name cannot be resolved"
    if "Connection refused" in details:
        return "connection refused"
    return details.rsplit("last error: ", 1)[-1] or error.code().name


# The few lines of protobuf that reading a status takes; the message classes
# would cost the import of TensorFlow. Fields are (number, wire type), from
# tensorflow/core/protobuf/worker.proto and framework/device_attributes.proto.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STATUS_DEVICE = (1, _BYTES)
_DEVICE_NAME = (1, _BYTES)
_DEVICE_INCARNATION = (6, _FIXED64)


def _parse_status(data):
    """Reads a `GetStatusResponse`; ValueError or IndexError if it is none."""
    devices = [
        dict(_fields(value))
        for field, value in _fields(data)
        if field == _STATUS_DEVICE
    ]
    if not all(_DEVICE_NAME in d and _DEVICE_INCARNATION in d for d in devices):
        raise ValueError("a device without name or incarnation")
    return Status(
        devices=tuple(device[_DEVICE_NAME].decode() for device in devices),
        incarnation=int.from_bytes(devices[0][_DEVICE_INCARNATION], "little"),
    )


def _fields(data):
    """Yields ((number, wire type), value) of a message; a varint's value is an int."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            value, at = _varint(data, at)
        elif wire_type in (_BYTES, _FIXED64, _FIXED32):
            size = {_FIXED64: 8, _FIXED32: 4}.get(wire_type)
            if size is None:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
            if len(value) < size:
                raise ValueError("the message ends within a field")
        else:
            raise ValueError(f"no such wire type: {wire_type}")
        yield (number, wire_type), value


def _varint(data, at):
    """Reads a number of seven bits a byte, lowest first: (number, next offset)."""
    number = shift = 0
    while True:
        byte = data[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
