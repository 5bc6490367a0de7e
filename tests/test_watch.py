"""Watching a task: loss, return within the grace, another process in its place."""

import queue

import pytest

from pstrain import probe, watch

FAST = {"every_secs": 0.01, "strikes": 3, "grace_secs": 0.05}


@pytest.fixture
def answers(monkeypatch):
    """What the task answers from now on: an incarnation, or None for silence."""
    state = {"incarnation": 1, "looks": 0, "silence_until": 0}

    def get_status(address):
        state["looks"] += 1
        if state["incarnation"] is None or state["looks"] < state["silence_until"]:
            raise probe.ProbeError("connection refused")
        return probe.Status(devices=(), incarnation=state["incarnation"])

    monkeypatch.setattr(probe, "get_status", get_status)
    return state


def start(lost):
    return watch.Watch({"ps 1": "h:1"}, lost.put, **FAST).start()


def test_a_silent_task_is_lost_with_name_address_and_cause(answers):
    lost = queue.SimpleQueue()
    answers["incarnation"] = None
    start(lost)
    assert lost.get(timeout=10) == "ps 1 at h:1 (connection refused)"


def test_a_task_that_was_started_anew_is_lost(answers):
    lost = queue.SimpleQueue()
    watching = start(lost)
    while not watching._incarnations:
        pass
    answers["incarnation"] = 2
    assert lost.get(timeout=10) == "ps 1 at h:1 (it was started anew)"


def test_a_task_that_answers_again_within_the_grace_is_not_lost(answers):
    lost = queue.SimpleQueue()
    answers["silence_until"] = 4
    watching = start(lost)
    while answers["looks"] < 20:
        pass
    watching.stop()
    assert lost.empty()
