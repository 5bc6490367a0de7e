"""What all tests share: no GPU, a quiet TensorFlow, and an end to every hang."""

import faulthandler
import os

# Before TensorFlow is imported, and inherited by the processes of tests.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import pytest  # noqa: E402

import pstrain.testing  # noqa: E402

_HANG_SECS = 300


@pytest.fixture(autouse=True)
def no_hang():
    """Ends the run, with the stack of every thread, where a test hangs.

    A lost message hangs within TensorFlow, where no exception reaches it.
    """
    faulthandler.dump_traceback_later(_HANG_SECS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def cluster():
    """Two ps and two workers within this process."""
    with pstrain.testing.cluster(num_ps=2, num_workers=2) as cluster:
        yield cluster
