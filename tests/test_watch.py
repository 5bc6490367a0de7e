"""Watching a task: loss, return within the grace, another process in its place."""

import queue
import threading

import pytest

from pstrain import probe, watch

FAST = {"every_secs": 0.01, "strikes": 3, "grace_secs": 0.05}


@pytest.fixture
def answers(monkeypatch):
    """What the task answers from now on: an incarnation, or None for silence."""
    state = {"incarnation": 1, "looks": 0, "silence_until": 0}
    state["looked"] = threading.Condition()

    def get_status(address):
        with state["looked"]:
            state["looks"] += 1
            state["looked"].notify_all()
        if state["incarnation"] is None or state["looks"] < state["silence_until"]:
            raise probe.ProbeError("connection refused")
        return probe.Status(devices=(), incarnation=state["incarnation"])

    monkeypatch.setattr(probe, "get_status", get_status)
    return state


def wait_for_looks(answers, count):
    with answers["looked"]:
        assert answers["looked"].wait_for(lambda: answers["looks"] >= count, 10)


def start(lost):
    return watch.Watch({"ps 1": "h:1"}, lost.put, **FAST).start()


def test_a_silent_task_is_lost_with_name_address_and_cause(answers):
    lost = queue.SimpleQueue()
    answers["incarnation"] = None
    start(lost)
    assert lost.get(timeout=10) == "ps 1 at h:1 (connection refused)"


def test_a_task_that_was_started_anew_is_lost(answers):
    lost = queue.SimpleQueue()
    start(lost)
    wait_for_looks(answers, 2)  # the first one has been taken in
    answers["incarnation"] = 2
    assert lost.get(timeout=10) == "ps 1 at h:1 (it was started anew)"


def test_a_task_that_answers_again_within_the_grace_is_not_lost(answers):
    lost = queue.SimpleQueue()
    answers["silence_until"] = 4
    watching = start(lost)
    wait_for_looks(answers, 20)
    watching.stop()
    assert lost.empty()
