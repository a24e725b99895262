"""metrics.jsonl, TensorBoard and the terminal: nothing twice, nothing lost, nothing unreadable."""

import io
import json

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from k3jax.display import Display, figures
from k3jax.errors import UserError
from k3jax.meter import Diverged, Meter
from k3jax.metrics import MetricsLog
from k3jax.run_dir import RunDir


def record(step, **more):
    return {"step": step, "loss": 5.0 - step / 10, "bits_per_byte": 7.0, "load": [1.0, 2.0]} | more


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def steps(run):
    return [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]


def test_a_resumed_run_repeats_no_line(run):
    log = MetricsLog(run)
    for step in range(1, 6):
        log.write(record(step))
    log.close()
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # what a kill leaves
    log = MetricsLog(run, resume_step=3)
    assert steps(run) == [1, 2, 3]
    log.write(record(4))
    log.close()
    assert steps(run) == [1, 2, 3, 4]


def test_a_line_is_there_as_soon_as_it_is_written(run):
    log = MetricsLog(run)
    log.write(record(1))
    assert steps(run) == [1]
    log.close()


def test_numbers_that_are_not_finite_are_null(run):
    log = MetricsLog(run)
    log.write(record(1, loss=float("nan"), load=[float("inf"), 1.0]))
    log.plot()
    log.close()
    (line,) = run.metrics_file.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == record(1, loss=None, load=[None, 1.0])


def test_the_plot_shows_what_was_there_before_a_resume(run):
    log = MetricsLog(run)
    log.write(record(1, val_loss=4.0))
    log.write(record(2))
    log.close()
    log = MetricsLog(run, resume_step=2)
    assert log._losses == [(1, 4.9), (2, 4.8)]
    assert log._validation == [(1, 4.0)]
    log.plot()
    log.close()
    assert run.plot_file.read_bytes().startswith(b"\x89PNG")
    assert not list(run.path.glob("*.tmp*"))


def events(path):
    """TFRecord frames: length, its checksum, the event, its checksum."""
    content, found = path.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        found.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return found


def test_tensorboard_gets_scalars_and_hides_what_a_resume_repeats(run):
    log = MetricsLog(run, resume_step=7)
    log.write(record(8))
    log.close()
    (file,) = run.tensorboard.iterdir()
    _, start, event = events(file)
    assert (start.session_log.status, start.step) == (1, 8)  # SessionLog.START
    assert event.step == 8
    found = {value.tag: value.simple_value for value in event.summary.value}
    assert found == pytest.approx({"loss": 4.2, "bits_per_byte": 7.0, "load/max": 2.0})


def test_a_folder_that_is_a_file_is_a_user_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl not written: Is a directory"):
        MetricsLog(RunDir(tmp_path))


# ---- terminal


def shown(terminal: bool, every: int = 2) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160)
    with Display(start=0, total=5, every=every, console=console) as display:
        display.note("a note with [brackets]")
        for step in range(1, 6):
            display.step(record(step, tokens_per_second=1234.5, mfu=0.4123))
    return out.getvalue()


def test_plain_lines_without_a_terminal():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "a note with [brackets]"
    assert [line.split()[1] for line in lines[1:]] == ["2/5", "4/5", "5/5"]
    assert "loss 4.8000  7.000 bits/byte  1,234 tok/s  MFU 41.2%" in lines[1]
    assert "left 0:00:00" in lines[1]
    assert "\x1b" not in "".join(lines)


def test_a_bar_with_remaining_time_on_a_terminal():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "5/5" in text
    assert "left" in text
    assert "MFU 41.2%" in text


def test_figures_leave_out_what_was_not_measured():
    assert figures({"step": 1, "loss": 2.0, "skipped": 1}) == "loss 2.0000  SKIPPED (not finite)"


# ---- meter


def device_metrics(skipped: int = 0):
    sums = {"nats": 20.0, "tokens": 10.0, "bytes": 5.0, "supervised_rows": 1.0}
    rates = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "tied_routers": 0}
    return sums | rates | {"expert_load": [1.5], "max_logit": [3.0], "skipped": skipped}


def meter(**options):
    options = {"tokens": 100, "flops": 1e6, "peak": 1e9, "max_skipped": 2} | options
    return Meter(**options)


def test_speed_and_mfu_count_only_the_step_itself(monkeypatch):
    clock = iter([10.0, 12.0, 99.0])
    monkeypatch.setattr("k3jax.meter.time.monotonic", lambda: next(clock))
    measured = meter()
    first = measured.record(1, device_metrics())
    second = measured.record(2, device_metrics())
    measured.pause()
    third = measured.record(3, device_metrics())
    assert "mfu" not in first, "the first step compiles"
    assert "mfu" not in third, "other work came between"
    assert second["tokens_per_second"] == pytest.approx(50)
    assert second["flops_per_second"] == pytest.approx(5e5)
    assert second["mfu"] == pytest.approx(5e-4)
    assert second["bits_per_byte"] == pytest.approx(20 / 5 / 0.6931471805599453)


def test_no_mfu_where_the_peak_is_unknown():
    measured = meter(peak=None)
    measured.record(1, device_metrics())
    assert "mfu" not in measured.record(2, device_metrics())


def test_kf_119_skipped_steps_count_in_a_row_and_over_a_resume():
    measured = meter(skipped=1)
    measured.record(1, device_metrics(skipped=0))
    measured.check(1)
    measured.record(2, device_metrics(skipped=1))
    measured.check(2)
    measured.record(3, device_metrics(skipped=1))
    with pytest.raises(Diverged, match="2 steps in a row, up to step 3"):
        measured.check(3)
    measured = meter(skipped=1)
    measured.record(1, device_metrics(skipped=1))
    with pytest.raises(Diverged):
        measured.check(1)
