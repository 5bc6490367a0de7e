"""Host lists and TF_CONFIG: what is accepted, and each mistake by name."""

import json

import pytest

from pstrain.cluster import Cluster, Task, resolve
from pstrain.errors import UsageError

PS, WORKERS = "a:1,b:2", "c:3,d:4"
CLUSTER = {"ps": ["a:1", "b:2"], "worker": ["c:3", "d:4"]}


def config(task=None, **jobs):
    cluster = {**CLUSTER, **jobs}
    return json.dumps({"cluster": cluster, "task": task or {"type": "ps", "index": 1}})


def test_hosts_become_a_cluster():
    cluster = Cluster.from_hosts(PS, WORKERS)
    assert cluster.ps == ("a:1", "b:2")
    assert cluster.workers == ("c:3", "d:4")
    assert cluster.coordinator_task == Task("worker", 0)
    assert [str(t) for t in cluster.tasks()] == ["ps 0", "ps 1", "worker 0", "worker 1"]
    assert cluster.address(Task("worker", 1)) == "d:4"


def test_a_chief_host_coordinates():
    cluster = Cluster.from_hosts(PS, WORKERS, "e:5")
    assert cluster.coordinator_task == Task("chief", 0)
    assert cluster.as_dict()["chief"] == ["e:5"]


def test_ipv6_hosts_stand_in_brackets():
    assert Cluster.from_hosts("[::1]:1", "[::1]:2").ps == ("[::1]:1",)


BAD_HOSTS = {
    "no ps": ("", WORKERS, "--ps_hosts is missing"),
    "no workers": (PS, "", "--worker_hosts is missing"),
    "trailing comma": ("a:1,", WORKERS, "comma too many"),
    "empty host": (":1", WORKERS, "form host:port; received: ':1'"),
    "no port": ("a", WORKERS, "form host:port; received: 'a'"),
    "zero port": ("a:0", WORKERS, "port from 1 to 65535; received: '0'"),
    "large port": ("a:99999", WORKERS, "port from 1 to 65535; received: '99999'"),
    "word for a port": ("a:http", WORKERS, "received: 'http'"),
    "twice in a list": ("a:1,a:1", WORKERS, "a:1 for ps 0 and ps 1"),
    "ps and worker": ("a:1", "a:1", "a:1 for ps 0 and worker 0"),
    "bare ipv6": ("::1:22", WORKERS, "form host:port"),
    "url": ("http://a:1", WORKERS, "form host:port"),
}


@pytest.mark.parametrize("name", BAD_HOSTS)
def test_bad_hosts_are_refused_with_what_was_received(name):
    ps, workers, message = BAD_HOSTS[name]
    with pytest.raises(UsageError) as error:
        Cluster.from_hosts(ps, workers)
    assert message in str(error.value)


def test_two_chiefs_are_refused():
    with pytest.raises(UsageError, match="takes one address"):
        Cluster.from_hosts(PS, WORKERS, "e:5,f:6")


def test_tf_config_of_an_operator_is_accepted():
    text = config({"type": "worker", "index": 1}, chief=["e:5"], evaluator=["f:6"])
    cluster, task = Cluster.from_tf_config(text)
    assert task == Task("worker", 1)
    assert cluster.chief == "e:5"
    assert cluster.evaluator == ("f:6",)
    assert Cluster.from_tf_config(cluster.tf_config(task)) == (cluster, task)


def test_master_is_the_old_name_of_the_chief():
    cluster, task = Cluster.from_tf_config(config({"type": "master"}, master=["e:5"]))
    assert (cluster.chief, task) == ("e:5", Task("chief", 0))


BAD_CONFIGS = {
    "not json": ("{", "TF_CONFIG is not JSON"),
    "a list": ("[]", "no field 'cluster'"),
    "no cluster": ("{}", "no field 'cluster'"),
    "no task": (json.dumps({"cluster": CLUSTER}), "no field 'task'"),
    "unknown job": (config(gpu=["a:9"]), "['gpu']"),
    "hosts as text": (config(ps="a:1"), "list of addresses for ps"),
    "no workers": (config(worker=[]), "2 ps and 0 workers"),
    "two chiefs": (config(chief=["a:8", "a:9"]), "one chief"),
    "index out of range": (config({"type": "ps", "index": 2}), "ps 2, but ps has 2"),
    "unknown task": (config({"type": "gpu", "index": 0}), "received: 'gpu'"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_tf_config_is_refused_with_what_was_received(name):
    text, message = BAD_CONFIGS[name]
    with pytest.raises(UsageError) as error:
        Cluster.from_tf_config(text)
    assert message in str(error.value)


def test_nothing_given_is_no_cluster():
    assert resolve(None, None, "", "", "", {}) is None


def test_flags_name_the_task():
    _, task = resolve("worker", 1, PS, WORKERS, "", {})
    assert task == Task("worker", 1)
    _, task = resolve("coordinator", None, PS, WORKERS, "e:5", {})
    assert task == Task("chief", 0)


def test_tf_config_alone_names_the_task():
    assert resolve(None, None, "", "", "", {"TF_CONFIG": config()})[1] == Task("ps", 1)


def test_flags_and_tf_config_may_say_the_same():
    _, task = resolve("ps", 1, PS, WORKERS, "", {"TF_CONFIG": config()})
    assert task == Task("ps", 1)


BAD_FLAGS = {
    "no job name": ((None, None, PS, WORKERS, ""), {}, "--job_name is missing"),
    "no hosts": (("ps", 0, "", "", ""), {}, "needs to know the cluster"),
    "unknown job": (("foo", 0, PS, WORKERS, ""), {}, "received: 'foo'"),
    "index too large": (("ps", 2, PS, WORKERS, ""), {}, "ps 2, but ps has 2 hosts"),
    "negative index": (("ps", -1, PS, WORKERS, ""), {}, "received: ps -1"),
    "other ps": (("ps", 1, "a:1,x:2", WORKERS, ""), config(), "differ in ps"),
    "other chief": (("ps", 1, PS, WORKERS, "e:5"), config(), "differ in chief"),
    "other task": (("ps", 0, PS, WORKERS, ""), config(), "ps 0 by flags, ps 1"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_refused_with_what_was_received(name):
    args, tf_config, message = BAD_FLAGS[name]
    environ = {"TF_CONFIG": tf_config} if tf_config else {}
    with pytest.raises(UsageError) as error:
        resolve(*args, environ)
    assert message in str(error.value)
