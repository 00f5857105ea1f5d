import os
import signal
import threading

import pytest

from tests.training import records, signalled, tiny_config
from vitascope import runs
from vitascope.errors import Interrupted
from vitascope.models.vit import VisionTransformer
from vitascope.training.checkpoint.folders import checkpoints
from vitascope.training.run.run import Run
from vitascope.training.signals import stop_signals
from vitascope.training.tasks.classify import Classify

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Acted(Exception):  # noqa: N818 - the previous handler was called
    pass


@pytest.fixture(autouse=True)
def _before(without_figures):

    def act(signum: int, frame: object) -> None:
        raise Acted(signum)

    before = {signum: signal.signal(signum, act) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_first_signal_requests_a_stop_and_a_second_one_acts(first: int, second: int) -> None:
    handlers = [signal.getsignal(each) for each in SIGNALS]
    with stop_signals() as stop:
        assert stop.signum == 0
        send(first)
        assert stop.signum == first
        with pytest.raises(Acted):
            send(second)
    assert stop.signum == first
    with pytest.raises(KeyError), stop_signals():
        raise KeyError
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


def test_no_handler_is_installed_in_another_thread() -> None:
    """Python allows signal handlers only in the main thread."""
    before, during = [signal.getsignal(each) for each in SIGNALS], []

    def elsewhere() -> None:
        with stop_signals() as stop:
            during.extend([*(signal.getsignal(each) for each in SIGNALS), stop.signum])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert during == [*before, 0]


def test_signal_during_a_step_stops_after_it(data, tmp_path) -> None:
    with signalled(2, signal.SIGINT), pytest.raises(Interrupted) as stopped:
        runs.train(tiny_config(data, run=str(tmp_path / "run")))
    assert (stopped.value.signum, stopped.value.run) == (signal.SIGINT, str(tmp_path / "run"))
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["step-00000003"]


@pytest.mark.parametrize("epoch", [1, 2])
def test_signal_during_validation_stops_within_a_batch_and_loses_nothing(
    data, tmp_path, monkeypatch, epoch: int
) -> None:
    """The resumed run begins with that validation, also with the last one."""
    forward, validate = VisionTransformer.forward, Classify.validate
    whole, run = tmp_path / "whole", tmp_path / "run"
    runs.train(tiny_config(data, run=str(whole), keep="last", epochs=2))
    validations, passes = [], []

    def counted(self: Classify, *arguments):
        validations.append(0)
        return validate(self, *arguments)

    def and_stop(self: VisionTransformer, images):
        if not self.training and len(validations) == epoch:
            passes.append(len(images))
            send(signal.SIGTERM)
        return forward(self, images)

    monkeypatch.setattr(Classify, "validate", counted)
    monkeypatch.setattr(VisionTransformer, "forward", and_stop)
    with pytest.raises(Interrupted):
        runs.train(tiny_config(data, run=str(run), keep="last", epochs=2))
    assert len(passes) == 1
    assert [folder.name for folder in checkpoints(run)] == [f"step-{5 * epoch:08d}"]
    monkeypatch.setattr(VisionTransformer, "forward", forward)
    runs.resume(run)
    assert len(validations) == 3
    assert records(whole) == records(run)
    assert [record["epoch"] for record in Run(run).records("epoch")] == [1, 2]
