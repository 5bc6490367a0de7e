"""Whole jobs as OS processes: layouts, start order, ends, resume, lost tasks."""

import signal
import subprocess
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pstrain.testing import ProcessCluster

SMALL = ["--set", "vocabulary_scale=0.1", "--log_steps=10"]
DEADLINE_SECS = 120


def flags(model_dir, last_step, *more):
    return [*SMALL, f"--model_dir={model_dir}", f"--last_step={last_step}", *more]


def text_of(cluster, task):
    output = cluster.output(task)
    return output if isinstance(output, str) else "\n".join(output)


def all_zero(codes):
    return all(code == 0 for code in codes.values())


def test_four_commands_train_to_the_last_step_and_a_rerun_resumes(tmp_path):
    with ProcessCluster(2, 2, flags=flags(tmp_path, 33)) as cluster:
        codes = cluster.wait(DEADLINE_SECS)
        assert all_zero(codes), codes
        assert set(codes) == {"ps 0", "ps 1", "worker 0", "worker 1"}
        text = text_of(cluster, "worker 0")
        assert "done at step 33" in text
        assert "best possible" in text
        assert "max over mean" in text
    _check_tensorboard(tmp_path / "logs")

    with ProcessCluster(2, 2, flags=flags(tmp_path, 50)) as cluster:
        assert all_zero(cluster.wait(DEADLINE_SECS))
        text = text_of(cluster, "worker 0")
        assert "training from step 33 to 50" in text
        assert "done at step 50" in text

    with ProcessCluster(2, 2, flags=flags(tmp_path, 40)) as cluster:
        assert all_zero(cluster.wait(DEADLINE_SECS))
        assert "nothing to do" in text_of(cluster, "worker 0")


def _check_tensorboard(logs):
    events = EventAccumulator(str(logs / "train"), size_guidance={"tensors": 0})
    events.Reload()
    tags = events.Tags()["tensors"]
    scalars = ["loss", "auc", "learning_rate", "steps_per_sec", "examples_per_sec"]
    assert set(scalars) <= set(tags)
    assert [e.step for e in events.Tensors("loss")] == [10, 20, 30, 33]
    (job,) = events.Tensors("job")
    text = job.tensor_proto.string_val[0].decode()
    for part in ("## Cluster", "worker 1", "user_ids/embeddings", "last_step"):
        assert part in text


def test_a_chief_coordinates_whatever_starts_first(tmp_path):
    cluster = ProcessCluster(1, 2, chief=True, flags=flags(tmp_path, 20), start=False)
    with cluster:
        cluster.start("chief 0")
        cluster.wait_for_output("chief 0", "starting TensorFlow", DEADLINE_SECS)
        for task in ("worker 1", "ps 0", "worker 0"):
            cluster.start(task)
        codes = cluster.wait(DEADLINE_SECS)
        assert all_zero(codes), codes
        assert "done at step 20" in text_of(cluster, "chief 0")
        assert "train |" not in text_of(cluster, "worker 0")


def test_sigterm_saves_tells_the_servers_and_exits_143(tmp_path):
    with ProcessCluster(1, 2, flags=flags(tmp_path, 10**6)) as cluster:
        cluster.wait_for_output("worker 0", "step 20/", DEADLINE_SECS)
        cluster.kill("worker 0", signal.SIGTERM)
        codes = cluster.wait(30)
        assert codes == {"ps 0": 0, "worker 0": 143, "worker 1": 0}
        assert "stopped at step" in text_of(cluster, "worker 0")
    assert (tmp_path / "checkpoint").exists()


def test_a_killed_worker_does_not_end_the_job(tmp_path):
    with ProcessCluster(1, 2, flags=flags(tmp_path, 400)) as cluster:
        cluster.wait_for_output("worker 0", "step 50/", DEADLINE_SECS)
        cluster.kill("worker 1", signal.SIGKILL)
        codes = cluster.wait(DEADLINE_SECS)
        assert (codes["ps 0"], codes["worker 0"]) == (0, 0)
        assert "done at step 400" in text_of(cluster, "worker 0")


def test_a_killed_ps_ends_the_job_with_its_name(tmp_path):
    with ProcessCluster(2, 2, flags=flags(tmp_path, 10**6)) as cluster:
        cluster.wait_for_output("worker 0", "step 50/", DEADLINE_SECS)
        cluster.kill("ps 1", signal.SIGKILL)
        codes = cluster.wait(DEADLINE_SECS)
        assert codes["worker 0"] == 1
        last = text_of(cluster, "worker 0").strip().splitlines()[-1]
        assert last.startswith("pstrain: the job cannot go on without ps 1 at")


def test_a_missing_ps_is_named_after_the_timeout(tmp_path):
    more = ["--start_timeout_secs=3"]
    cluster = ProcessCluster(1, 1, flags=flags(tmp_path, 20, *more), start=False)
    with cluster:
        cluster.start("worker 0")
        assert cluster.wait(60, tasks=["worker 0"]) == {"worker 0": 1}
        text = text_of(cluster, "worker 0")
        assert "pstrain: the job cannot start" in text
        assert "missing: ps 0" in text


def test_a_checkpoint_of_another_model_is_refused_and_left_alone(tmp_path):
    command = [sys.executable, "-m", "pstrain", "--num_ps=1", "--num_workers=1"]

    def run(*more):
        return subprocess.run(
            [*command, *flags(tmp_path, 10, *more)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECS,
        )

    assert run().returncode == 0
    before = sorted(p.name for p in tmp_path.iterdir())
    result = run("--set", "embedding_dim=8", "--last_step=20")
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert "pstrain: the model directory holds a checkpoint of another model" in last
    assert "embeddings" in last
    assert sorted(p.name for p in tmp_path.iterdir()) == before
