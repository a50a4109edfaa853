"""mpp/tracking.py with a real TensorBoard, read back from its files."""

import pytest
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from mpp import tracking
from mpp.errors import UserError


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = Accelerator(
        cpu=True, log_with="tensorboard", project_config=ProjectConfiguration(logging_dir=str(tmp_path / "tensorboard"))
    )
    settings = {"optim.steps": 4, "init": None, "data.crop_area": [0.5, 1.0]}
    with tracking.tracking(accelerator, "tensorboard", tmp_path, settings) as send:
        send(2, {"step": 2, "loss": 0.5})
        send(4, {"step": 4, "loss": 0.25})
    found = events.EventAccumulator(str(tmp_path / "tensorboard" / tracking.PROJECT))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(2, 0.5), (4, 0.25)]


def test_none_sends_nothing(tmp_path):
    with tracking.tracking(Accelerator(cpu=True), "none", tmp_path, {}) as send:
        send(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_refused():
    tracking.require_tracker("none")
    with pytest.raises(UserError, match=r"runtime.tracker=no_such_tracker: .*pip install no_such_tracker"):
        tracking.require_tracker("no_such_tracker")
