import dataclasses
import math
import struct
import subprocess
import sys
import time

import pytest
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.record_writer import masked_crc32c as theirs

from harness.report.event_file import EventFile, masked_crc32c
from harness.report.pictures import Pictures
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.folder import read_sweep
from harness.report.sweep.sweep_report import SweepReport
from harness.report.tensorboard import TensorBoard, hparams
from harness.run.folder import RunDir, read_events
from harness.run.job import Job
from tests.reports import (
    GREEN,
    RED,
    changed,
    events,
    failed_result,
    four_jobs,
    job_of,
    recorded,
    run_of,
    with_verdict,
    written,
)  # fmt: skip

SCALARS = {"loss/train", "loss/eval", "accuracy/eval", "perf/step_ms", "perf/samples_per_s", "lr"}


def scalars(run, tag):
    return [(event.step, event.value) for event in run.Scalars(tag)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = recorded("four_jobs", tmp_path_factory.mktemp("tb"))
    sweep = read_sweep(folder)
    Pictures().report(sweep)
    TensorBoard().report(sweep)
    return sweep


def test_each_job_has_one_run_named_by_what_was_swept(sweep, tmp_path):
    for job in sweep.jobs:
        (path,) = (p.parent.name for p in RunDir(job.folder).path.glob("*/events*"))
        assert path == f"launcher={job.plan.method},nprocs={job.plan.nprocs}"


def test_scalars_are_those_of_the_records_each_step_once(sweep):
    for job in sweep.jobs:
        run = run_of(RunDir(job.folder).path)
        assert SCALARS | {"perf/run_delay_ms"} <= set(run.Tags()["scalars"])
        assert scalars(run, "loss/train") == [(n, pytest.approx(v)) for n, v in enumerate(job.result.losses())]
        expected = [(n, pytest.approx(v * 1e3)) for n, v in enumerate(job.result.step_seconds())]
        assert scalars(run, "perf/step_ms") == expected
        delays = [max(p.delay_s for p in parts) * 1e3 for parts in zip(*(r.steps for r in job.result.ranks), strict=True)]
        assert [value for _, value in scalars(run, "perf/run_delay_ms")] == pytest.approx(delays)
        means = {one.step: one.means() for one in job.result.ranks[0].evaluations}
        assert scalars(run, "accuracy/eval") == [(n, pytest.approx(one["accuracy"])) for n, one in means.items()]
        assert len(means) == 2


def test_exposed_communication_is_that_of_the_rank_that_waits_longest(tmp_path):
    job = dataclasses.replace(job_of(0, nprocs=2), folder=str(tmp_path / "0"))
    ranks = []
    for rank, exposed_s in zip(job.result.ranks, (0.001, 0.004), strict=True):
        steps = tuple(dataclasses.replace(step, comm_exposed_s=exposed_s) for step in rank.steps)
        ranks.append(dataclasses.replace(rank, steps=steps))
    known = dataclasses.replace(job, result=dataclasses.replace(job.result, ranks=tuple(ranks)))
    TensorBoard().report(SweepReport(str(tmp_path), (known,)))
    run = run_of(tmp_path / "0")
    assert scalars(run, "perf/comm_exposed_ms") == [(number, pytest.approx(4.0)) for number in range(12)]
    assert "perf/run_delay_ms" not in run.Tags()["scalars"]


def test_times_are_those_when_it_happened(sweep):
    job = sweep.jobs[1]
    written_at = [event.wall_time for event in run_of(RunDir(job.folder).path).Scalars("loss/train")]
    ends = [max(parts) for parts in zip(*([s.t for s in rank.steps] for rank in job.result.ranks), strict=True)]
    assert written_at == pytest.approx([end + sweep.clock_offset_s for end in ends], abs=1e-3)
    assert abs(written_at[0] - 1796000000) < 1e6  # a day in 2026, not a monotonic clock


def test_launchers_share_a_chart_per_recipe_and_ranks(sweep):
    run = events(RunDir(sweep.folder).path)
    (event,) = run.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["mnist on 1 rank", "mnist on 2 ranks"]
    assert [chart.title for chart in layout.category[0].chart] == ["loss", "step time, ms", "samples per second"]
    for category, nprocs in zip(layout.category, (1, 2), strict=True):
        for chart in category.chart:
            (pattern,) = chart.multiline.tag
            tag = pattern.strip("^$")
            matching = [job for job in sweep.jobs if tag in run_of(RunDir(job.folder).path).Tags()["scalars"]]
            assert {job.plan.nprocs for job in matching} == {nprocs}
            assert {job.plan.method for job in matching} == {"spawn", "launch"}


def session(run, name):
    content = run.SummaryMetadata(f"_hparams_/{name}").plugin_data.content
    return getattr(HParamsPluginData.FromString(content), name)


def test_hparams_have_one_row_per_job_with_settings_and_final_numbers(sweep):
    for job in sweep.jobs:
        run = run_of(RunDir(job.folder).path)
        start = session(run, "session_start_info")
        assert start.hparams["launcher"].string_value == job.plan.method
        assert start.hparams["nprocs"].number_value == job.plan.nprocs
        assert start.hparams["recipe.lr"].number_value == pytest.approx(job.plan.train.recipe["lr"])
        assert start.hparams["epochs"].string_value == "null"
        assert start.start_time_secs == pytest.approx(job.result.marks["called"] + sweep.clock_offset_s, abs=1e-3)
        assert session(run, "session_end_info").status == 1  # STATUS_SUCCESS
        final = {tag: run.Scalars(tag)[-1].value for tag in run.Tags()["scalars"] if tag.startswith("final/")}
        assert final == {
            "final/first_step_s": pytest.approx(times.first_step_s(job)),
            "final/step_ms": pytest.approx(times.step_s(job) * 1e3),
            "final/samples_per_s": pytest.approx(times.samples_per_s(job)),
            "final/loss": pytest.approx(job.result.losses()[-1]),
            "final/correct": 1.0,
        }


def test_lists_none_and_nested_settings_survive_as_hparams():
    values = hparams(job_of(0, clip_norm=0.5))
    assert values["recipe.betas"].string_value == "[0.9, 0.99]"
    assert values["recipe.root"].string_value == "null"
    assert values["clip_norm"].number_value == 0.5
    assert values["deterministic"].bool_value is True
    assert values["ddp.bucket_cap_mb"].number_value == 25 and values["ddp.comm_hook"].string_value == "none"
    assert "ddp" not in values and not any("(" in value.string_value for value in values.values())
    assert "recipe._target_" not in values


def test_the_table_is_there_as_text_and_pictures_as_images(sweep):
    run = events(RunDir(sweep.folder).path)
    text = run.Tensors("verdicts")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[0].startswith("| job | launcher | nprocs | first step |")
    assert "equal to 1 process: 11 of 11 checks" in text and "identical to job 0" in text
    images = run.Tags()["images"]
    assert {"pictures/Loss", "pictures/Start-up", "pictures/Step times", "pictures/Scaling"} <= set(images)
    (image,) = run.Images("pictures/Loss")
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 500 and image.height > 200


def test_every_check_is_there_as_text(sweep):
    run = events(RunDir(sweep.folder).path)
    tags = [tag for tag in run.Tags()["tensors"] if tag.startswith("every check/")]
    texts = [run.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags]
    assert tags[0] == "every check/Job 0" and all("| R5 | update | passed |  | equal | bits |" in text for text in texts)


def test_a_failed_check_is_localised_in_text(tmp_path):
    sweep = four_jobs(str(tmp_path / "sweep"))
    red = with_verdict(sweep.jobs[1], GREEN, RED)
    written(sweep)
    TensorBoard().report(changed(sweep, 1, correctness=red.correctness))
    text = events(tmp_path / "sweep").Tensors("failed checks/job 1")[0].tensor_proto.string_val[0].decode()
    assert "R4 reduction" in text and "| rank | 1 |" in text and "fc.weight" in text and "1e-06 (theorem)" in text
    assert run_of(tmp_path / "sweep" / "1").Scalars("final/correct")[-1].value == 0.0


def test_a_failed_job_ends_as_failed_and_keeps_its_steps(tmp_path):
    sweep = read_sweep(recorded("one_failed", tmp_path))
    TensorBoard().report(sweep)
    good, bad = (run_of(RunDir(job.folder).path) for job in sweep.jobs)
    assert session(bad, "session_end_info").status == 2  # STATUS_FAILURE
    assert session(good, "session_end_info").status == 1
    assert "final/correct" not in bad.Tags()["scalars"]


def live(folder, job, num):
    """Let a job of recorded events run up to a step; return the reporter."""
    board = TensorBoard()
    started = Job(job.plan, RunDir(folder / "0"), job.overrides, job.label)
    board.begin(str(folder), [started])
    board.started(started)
    for step in range(num):
        for rank in job.result.ranks:
            board.event(rank.rank, {"event": "step", **vars(rank.steps[step])})
    return board, started


def test_events_are_there_while_the_job_runs(tmp_path):
    job = job_of(0, nprocs=2)
    board, started = live(tmp_path, job, 5)
    assert [step for step, _ in scalars(run_of(tmp_path / "0"), "loss/train")] == [0, 1, 2, 3, 4]
    board.event(0, {"event": "step", **vars(job.result.ranks[0].steps[5])})
    assert len(scalars(run_of(tmp_path / "0"), "loss/train")) == 5, "a step counts when all ranks have done it"
    board.event(1, {"event": "step", **vars(job.result.ranks[1].steps[5])})
    assert len(scalars(run_of(tmp_path / "0"), "loss/train")) == 6
    layout = events(tmp_path).Tensors("custom_scalars__config__")
    assert len(layout) == 1, "the charts are laid out before the end"
    board.ended(started, job.result)
    assert run_of(tmp_path / "0").Scalars("final/loss")


def test_live_and_rebuilt_say_the_same(tmp_path):
    job = dataclasses.replace(job_of(0, nprocs=2), folder=str(tmp_path / "0"))
    board, started = live(tmp_path, job, 12)
    board.ended(started, job.result)
    before = run_of(tmp_path / "0")
    sweep = dataclasses.replace(four_jobs(str(tmp_path)), jobs=(job,), clock_offset_s=time.time() - time.monotonic())
    TensorBoard().report(sweep)
    after = run_of(tmp_path / "0")
    for tag in ("loss/train", "perf/step_ms", "final/loss"):
        assert scalars(after, tag) == scalars(before, tag)
        written_at = [[event.wall_time for event in run.Scalars(tag)] for run in (before, after)]
        assert written_at[1] == pytest.approx(written_at[0], abs=0.05)


def test_a_file_cut_off_by_a_crash_is_read_up_to_there(tmp_path):
    live(tmp_path, job_of(0, nprocs=2), 5)
    path = next((tmp_path / "0").glob("*/events*"))
    path.write_bytes(path.read_bytes()[:-7])
    assert [step for step, _ in scalars(run_of(tmp_path / "0"), "loss/train")] == [0, 1, 2, 3]


def test_a_report_of_a_report_replaces_it(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    for _ in range(2):
        TensorBoard().report(read_sweep(folder))
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 5
    assert len(scalars(run_of(folder / "0"), "loss/train")) == 16


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 3])
def test_the_checksum_is_tensorboards(data):
    assert masked_crc32c(data) == theirs(data)


def test_a_frame_is_one_write(tmp_path):
    file = EventFile(tmp_path, 1.0)
    size = file.path.stat().st_size
    file.scalars({"a": math.pi}, 3, 2.0)
    data = file.path.read_bytes()[size:]
    (length,) = struct.unpack("<Q", data[:8])
    assert len(data) == length + 16


def test_names_are_safe_on_any_file_system():
    odd = dataclasses.replace(job_of(0), overrides=("recipe.root='/a b/ü:*?\"<>|'", "x=" + "y" * 300))
    name = tables.run_name(odd, [odd, job_of(1)])
    assert len(name) <= 120 and not set(name) & set("/\\ :*?\"<>|'")
    assert tables.run_name(job_of(0), [job_of(0)]) == "launcher=spawn,nprocs=1"


def test_a_foreign_app_gets_no_events(tmp_path):
    job = job_of(0, folder=str(tmp_path / "0"), result=failed_result())
    foreign = dataclasses.replace(job, plan=dataclasses.replace(job.plan, train=None))
    TensorBoard().report(dataclasses.replace(four_jobs(str(tmp_path)), jobs=(foreign,)))
    assert list(tmp_path.rglob("events*")) == []


def test_the_writer_imports_neither_torch_nor_numpy_and_starts_no_thread(tmp_path):
    code = (
        "import sys, threading; import harness.report.tensorboard; from harness.report.event_file import EventFile\n"
        f"EventFile(__import__('pathlib').Path({str(tmp_path)!r}), 1.0).scalars({{'a': 1.0}}, 0, 1.0)\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'tensorflow'} & set(sys.modules), sys.modules.keys()\n"
        "assert threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_recorded_ranks_are_what_the_result_says(tmp_path):
    folder = recorded("four_jobs", tmp_path)
    steps = [event["step"] for event in read_events(RunDir(folder / "0").records(0)) if event["event"] == "step"]
    assert steps == list(range(16))
