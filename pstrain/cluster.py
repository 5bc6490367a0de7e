"""Who is in the cluster: hosts, roles, and TF_CONFIG both ways.

The host lists of the 2016 flags and the TF_CONFIG that Kubernetes operators write
say the same thing; both become a `Cluster` here, and every mistake in them is
found here, before TensorFlow is imported and before a port is opened.
"""

import dataclasses
import json

from pstrain.errors import UsageError

JOBS = ("ps", "worker", "chief", "evaluator")
# Other names for the task that coordinates: what users say, and what TF_CONFIG
# said before TensorFlow 2.
ALIASES = {"coordinator": "chief", "master": "chief"}


@dataclasses.dataclass(frozen=True)
class Task:
    """One process of a cluster, by its job and its number there."""

    job: str
    index: int

    def __str__(self):
        """For example "ps 1"."""
        return f"{self.job} {self.index}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses (`host:port`) of all tasks.

    Attributes:
        ps: tuple of str, the parameter servers.
        workers: tuple of str.
        chief: str, the coordinator's own address; None where worker 0 coordinates.
        evaluator: tuple of str, tasks that the training never waits for.
    """

    ps: tuple
    workers: tuple
    chief: str | None = None
    evaluator: tuple = ()

    @classmethod
    def from_hosts(cls, ps_hosts, worker_hosts, chief_host=""):
        """Makes a cluster of comma-separated host lists.

        Args:
            ps_hosts: str, for example "10.0.0.1:2222,10.0.0.2:2222".
            worker_hosts: str.
            chief_host: str, one address, or "" where worker 0 coordinates.

        Raises:
            UsageError: an address is malformed, missing or given twice.
        """
        chief = _addresses("--chief_host", chief_host) if chief_host else ()
        if len(chief) > 1:
            raise UsageError(
                f"--chief_host takes one address; received: {chief_host!r}"
            )
        cluster = cls(
            ps=_addresses("--ps_hosts", ps_hosts),
            workers=_addresses("--worker_hosts", worker_hosts),
            chief=chief[0] if chief else None,
        )
        cluster._check_distinct()
        return cluster

    @classmethod
    def from_tf_config(cls, text):
        """Makes a cluster of the text of a TF_CONFIG.

        Args:
            text: str, JSON with the fields `cluster` and `task`.

        Returns:
            `(Cluster, Task)`: all tasks, and the one of this process.

        Raises:
            UsageError: it is not JSON, or lacks something.
        """
        try:
            config = json.loads(text)
        except ValueError as error:
            raise UsageError(
                f"TF_CONFIG is not JSON ({error}); received: {text[:80]!r}"
            ) from error
        if not isinstance(config, dict) or not isinstance(config.get("cluster"), dict):
            raise UsageError(
                "TF_CONFIG has no field 'cluster' with the host lists; received: "
                f"{text[:200]!r}"
            )
        hosts = {ALIASES.get(job, job): v for job, v in config["cluster"].items()}
        unknown = set(hosts) - set(JOBS)
        if unknown:
            raise UsageError(
                f"TF_CONFIG names a job that pstrain does not know; received: "
                f"{sorted(unknown)}; known are {', '.join(JOBS)}"
            )
        lists = {job: _listed(job, hosts.get(job, [])) for job in JOBS}
        if len(lists["chief"]) > 1:
            raise UsageError(
                f"TF_CONFIG may name one chief; received: {list(lists['chief'])}"
            )
        cluster = cls(
            ps=lists["ps"],
            workers=lists["worker"],
            chief=lists["chief"][0] if lists["chief"] else None,
            evaluator=lists["evaluator"],
        )
        cluster._check_distinct()
        task = config.get("task")
        if not isinstance(task, dict) or "type" not in task:
            raise UsageError(
                "TF_CONFIG has no field 'task' with 'type' and 'index', so this "
                f"process does not know which task it is; received: task={task!r}"
            )
        return cluster, cluster.task(task["type"], task.get("index", 0), "TF_CONFIG")

    def _check_distinct(self):
        if not self.ps or not self.workers:
            raise UsageError(
                "a cluster needs at least one ps and one worker; received: "
                f"{len(self.ps)} ps and {len(self.workers)} workers; give --ps_hosts "
                "and --worker_hosts, or both jobs in TF_CONFIG"
            )
        seen = {}
        for job, addresses in self.as_dict().items():
            for index, address in enumerate(addresses):
                task = Task(job, index)
                if address in seen:
                    raise UsageError(
                        f"two tasks cannot have one address; received: {address} for "
                        f"{seen[address]} and {task}"
                    )
                seen[address] = task

    def task(self, job, index, source="flags"):
        """The task of a job name and a number, checked against the host lists.

        Raises:
            UsageError: there is no such task.
        """
        known = ", ".join([*JOBS, "coordinator"])
        name = ALIASES.get(job, job)
        if name not in JOBS:
            raise UsageError(
                f"unknown job name ({source}); received: {job!r}; known are {known}"
            )
        if not isinstance(index, int):
            try:
                index = int(index)
            except (TypeError, ValueError):
                raise UsageError(
                    f"the task index must be a number ({source}); received: {index!r}"
                ) from None
        count = len(self.as_dict().get(name, ()))
        if name == "chief":
            count = 1  # it needs no address of its own
        if not 0 <= index < count and name != "evaluator":
            hosts = f"{count} host" if count == 1 else f"{count} hosts"
            raise UsageError(
                f"the task index is out of range ({source}); received: {name} {index}, "
                f"but {name} has {hosts}, numbered from 0"
            )
        return Task(name, index)

    def as_dict(self):
        """The host lists by job, without empty jobs."""
        lists = {
            "chief": [self.chief] if self.chief else [],
            "ps": list(self.ps),
            "worker": list(self.workers),
            "evaluator": list(self.evaluator),
        }
        return {job: hosts for job, hosts in lists.items() if hosts}

    def tasks(self):
        """All tasks that serve: ps first, then workers."""
        return [
            *(Task("ps", i) for i in range(len(self.ps))),
            *(Task("worker", i) for i in range(len(self.workers))),
        ]

    def address(self, task):
        """The `host:port` of a task."""
        return self.as_dict()[task.job][task.index]

    @property
    def coordinator_task(self):
        """The task that coordinates: the chief, or worker 0 without one."""
        return Task("worker", 0) if self.chief is None else Task("chief", 0)

    def tf_config(self, task):
        """The TF_CONFIG of one task, as JSON."""
        entry = {"type": task.job, "index": task.index}
        return json.dumps({"cluster": self.as_dict(), "task": entry})


def resolve(job_name, task_index, ps_hosts, worker_hosts, chief_host, environ):
    """What the flags and the environment say of this process.

    Args:
        job_name: str or None.
        task_index: int or None.
        ps_hosts: str, "" if not given; so are the other two.
        worker_hosts: str.
        chief_host: str.
        environ: mapping, where TF_CONFIG may be.

    Returns:
        `(Cluster, Task)`, or None if neither names a cluster.

    Raises:
        UsageError: they are wrong, incomplete, or differ.
    """
    by_config = None
    if environ.get("TF_CONFIG"):
        by_config = Cluster.from_tf_config(environ["TF_CONFIG"])
    if not (ps_hosts or worker_hosts or chief_host):
        if by_config is None:
            if job_name is not None:
                raise UsageError(
                    f"--job_name={job_name} needs to know the cluster; received: no "
                    "--ps_hosts, no --worker_hosts and no TF_CONFIG"
                )
            return None
        cluster, task = by_config
        given = cluster.task(
            job_name or task.job, task_index if task_index is not None else task.index
        )
        _require_same("this task", str(given), str(task))
        return by_config
    if job_name is None:
        raise UsageError(
            "--job_name is missing: which task of the cluster is this process? "
            f"received: --ps_hosts={ps_hosts} --worker_hosts={worker_hosts}; give one "
            f"of {', '.join(JOBS)} and --task_index"
        )
    cluster = Cluster.from_hosts(ps_hosts, worker_hosts, chief_host)
    task = cluster.task(job_name, task_index or 0)
    if by_config is not None:
        other, other_task = by_config
        _require_same("ps", cluster.ps, other.ps)
        _require_same("workers", cluster.workers, other.workers)
        _require_same("chief", cluster.chief, other.chief)
        _require_same("this task", str(task), str(other_task))
    return cluster, task


def _require_same(what, by_flags, by_config):
    if by_flags != by_config:
        raise UsageError(
            f"flags and TF_CONFIG differ in {what}; received: {by_flags} by flags, "
            f"{by_config} by TF_CONFIG; give only one of them"
        )


def _listed(job, value):
    if not isinstance(value, list):
        raise UsageError(
            f"TF_CONFIG needs a list of addresses for {job}; received: {value!r}"
        )
    return tuple(_address(f"TF_CONFIG {job}", item) for item in value)


def _addresses(flag, text):
    if not text:
        raise UsageError(f"{flag} is missing; give a comma-separated list of host:port")
    return tuple(_address(flag, item.strip()) for item in text.split(","))


def _address(source, text):
    """Checks one `host:port`; IPv6 hosts stand in brackets."""
    if not isinstance(text, str) or not text:
        raise UsageError(
            f"{source} has an empty address; received: {text!r}; is there a comma too "
            "many?"
        )
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or "/" in text:
        raise UsageError(
            f"{source} needs addresses of the form host:port; received: {text!r}"
        )
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UsageError(
            f"{source} needs a port from 1 to 65535; received: {port!r} in {text!r}"
        )
    return text
