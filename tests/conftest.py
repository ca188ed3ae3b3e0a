"""What every test gets."""

import gc
import itertools
import os
import signal
import threading

import cloudpickle
import hypothesis
import pytest

from labkit.launch import watchdog
from labkit.launch.client import ServerHandle
from tests.support.nccl import put_under_nccls_rules, under_nccls_rules
from tests.support.sweep import IS_SWEEP


def pytest_configure():
    """Give each of xdist's workers cores of its own, if there are some: messages take less time there."""
    cores, num_workers = sorted(os.sched_getaffinity(0)), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0))
    if num_workers and (own := cores[int(os.environ["PYTEST_XDIST_WORKER"][2:]) :: num_workers]):
        os.sched_setaffinity(0, own)
    if "NCCL_RULES" in os.environ:
        put_under_nccls_rules()
    # No deadline: no test fails because the machine is busy.
    hypothesis.settings.register_profile("lab", deadline=None, max_examples=5000 if IS_SWEEP else 100)
    hypothesis.settings.load_profile("lab")
    watchdog._QUIET_SECONDS = 0.5  # a deadlock takes 1.5 s less; it is told from slow ranks by more looks, not fewer


def pytest_generate_tests(metafunc):
    """A test with this mark runs on gloo, and again by NCCL's rules. In a sweep, everything runs by those only."""
    if metafunc.definition.get_closest_marker("nccl_rules") and "NCCL_RULES" not in os.environ:
        metafunc.parametrize("rules", ["gloo", "nccl_rules"], indirect=True)


def pytest_collection_modifyitems(items):
    if "NCCL_RULES" in os.environ:
        for item in items:
            if item.get_closest_marker("gloo"):
                item.add_marker(pytest.mark.skip(reason="it looks at what only gloo does"))


@pytest.fixture(autouse=True)
def rules(request):
    if getattr(request, "param", "gloo") == "gloo":
        yield
        return
    with under_nccls_rules():
        yield


def pytest_collection_finish():
    """Leave what is there now alone when garbage is collected: thousands of tests and torch's modules."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from stopped_if_it_hangs(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):  # of a module's fixtures too
    return (yield from stopped_if_it_hangs(item))


def stopped_if_it_hangs(item):
    """Stop a test that hangs as the stop button does: it fails, with a report of where its ranks are."""
    seconds, stopped = 0.8 * float(item.config.getini("faulthandler_timeout")), threading.Event()

    def stop():
        stopped.set()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    except KeyboardInterrupt as interrupt:
        if not stopped.is_set():
            raise
        raise TimeoutError(f"it was stopped after {seconds:.0f} seconds: {interrupt}") from interrupt
    finally:
        timer.cancel()


@pytest.fixture(scope="session")
def progress_files(tmp_path_factory):
    """Names of files that do not exist yet; making a folder for every test would take longer than most tests."""
    folder = tmp_path_factory.mktemp("progress")
    return (str(folder / f"{number}.json") for number in itertools.count())


@pytest.fixture(autouse=True)
def own_progress(progress_files, monkeypatch):
    """Exercises that tests solve are not noted as solved by whoever runs the tests."""
    monkeypatch.setenv("LABKIT_PROGRESS", next(progress_files))


@pytest.fixture(autouse=True, scope="module")
def functions_travel_without_their_file(request):
    """Ranks get a test's functions by value: to find them by name, each would import pytest for a tenth of a second."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def launches(monkeypatch):
    """Grows by the number of ranks at every launch: a launch takes about a tenth of a second."""
    fork, counted = ServerHandle.fork, []

    def fork_and_count(self, world_id, num_ranks, descriptors):
        counted.append(num_ranks)
        return fork(self, world_id, num_ranks, descriptors)

    monkeypatch.setattr(ServerHandle, "fork", fork_and_count)
    return counted
