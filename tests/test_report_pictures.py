import dataclasses
import itertools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import harness
from harness.compare.performance.phases import PHASES
from harness.report.figures import charts
from harness.report.figures.grids import fault_matrix
from harness.report.figures.theme import GREY, SERIES, for_page, line, styled
from harness.report.figures.timeline import marks_of, oversubscribed, start_up, thinned
from harness.report.pictures import Pictures, read_pictures
from harness.report.sweep.build import sweep_report
from harness.report.sweep.folder import read_sweep
from harness.run.plan import Ddp
from tests.reports import (
    GREEN,
    MACHINE,
    RED,
    changed,
    failed_result,
    four_jobs,
    hundred_jobs,
    job_of,
    recorded,
    with_trials,
    with_verdict,
)  # fmt: skip


def drawn(sweep):
    return {drawing.name: drawing for drawing in charts.drawings(sweep)}


def axes_of(drawing):
    return drawing.figure.axes[0]


def all_texts(drawing):
    from matplotlib.text import Text

    return [text.get_text() for text in drawing.figure.findobj(Text) if text.get_text()]


def test_each_picture_has_title_units_and_a_text_alternative():
    sweep = changed(four_jobs("f"), 1, correctness=with_verdict(job_of(1), GREEN, RED).correctness)
    found = drawn(sweep)
    assert set(found) == {"loss", "start-up", "step-times", "scaling", "time-line", "checks"}
    for name, drawing in found.items():
        assert drawing.alt.endswith(".") and len(drawing.alt) > 40, name
        assert any(text.strip() for text in (axes_of(drawing).get_title("left"), axes_of(drawing).get_title())), name
    for name, words in {"start-up": "seconds", "step-times": "ms per step", "time-line": "ms", "loss": "step"}.items():
        assert words in axes_of(found[name]).get_xlabel()
    assert axes_of(found["scaling"]).get_ylabel() == "samples/s"


def test_legends_name_the_jobs():
    texts = all_texts(drawn(four_jobs("f"))["loss"])
    assert {"0: spawn, nprocs 1", "3: launch, nprocs 2"} <= set(texts)


def test_files_are_written_for_page_and_for_everything_else(tmp_path):
    sweep = read_sweep(recorded("four_jobs", tmp_path))
    Pictures().report(sweep)
    pictures = read_pictures(tmp_path / "outputs" / "2026-11-30" / "four_jobs")
    assert len(pictures) == 6
    for picture in pictures:
        assert picture.png.read_bytes().startswith(b"\x89PNG")
        root = ElementTree.fromstring(picture.svg.read_text())
        assert "width" not in root.attrib and root.attrib["viewBox"]
        assert "#1a1a1b" not in picture.svg.read_text(), "ink is the page's"


def test_pictures_of_before_go_away(tmp_path):
    sweep = read_sweep(recorded("four_jobs", tmp_path))
    Pictures().report(sweep)
    stale = read_pictures(tmp_path / "outputs" / "2026-11-30" / "four_jobs")[0].svg
    Pictures(min_jobs=5).report(sweep)
    assert not stale.exists() and read_pictures(stale.parent.parent) == []


def test_phases_of_start_up_add_up_to_the_first_step():
    for job in four_jobs("f").jobs:
        phases = start_up(job)
        assert phases[-1].phase == "first step"
        assert sum(phase.seconds for phase in phases) == pytest.approx(job.result.first_step_s())
        assert {phase.owner for phase in phases} == {"launcher", "framework"}


def test_marks_are_called_as_phases_are():
    job = four_jobs("f").jobs[0]
    marks = marks_of(job, job.result.ranks[0])
    assert marks.keys() <= PHASES.keys()
    assert marks["data and model"] == 99.5 and marks["called"] == 98.0 and marks["last step"] == job.result.ranks[0].steps[-1].t


def test_recorded_marks_are_known_phases(tmp_path):
    for job in read_sweep(recorded("four_jobs", tmp_path)).jobs:
        assert start_up(job)[-1].phase == "first step"


def test_ratio_intervals_are_drawn_where_there_are_several_launches():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)]
    several = drawn(sweep_report("f", jobs, MACHINE))["step-times"].figure.axes[1]
    assert "hollow" not in several.get_xlabel()
    single = drawn(four_jobs("f"))["step-times"].figure.axes[1]
    assert "hollow: one launch, no claim" in single.get_xlabel()


def test_pictures_are_of_the_launches_that_verdicts_are_of():
    jobs = [with_trials(job_of(0, "spawn", 2), 1.0), with_trials(job_of(1, "launch", 2), 1.5)]
    found = drawn(sweep_report("f", jobs, MACHINE))
    assert "Medians: job 0: 10.3 ms; job 1: 15.5 ms" in found["step-times"].alt
    names = [label.get_text() for label in axes_of(found["start-up"]).get_yticklabels()]
    assert names == ["spawn, 2 ranks (6 launches)", "launch, 2 ranks (6 launches)"]
    assert "under spawn from a warm server (its own start is not included)" in axes_of(found["start-up"]).get_xlabel()


def test_oversubscribed_jobs_are_hollow_and_said_so():
    few = dataclasses.replace(four_jobs("f"), machine={**MACHINE, "cores": "1"})
    assert "oversubscribed" in axes_of(drawn(few)["scaling"]).get_xlabel()
    assert "oversubscribed" in drawn(few)["scaling"].alt
    assert "oversubscribed" not in axes_of(drawn(four_jobs("f"))["scaling"]).get_xlabel()
    assert oversubscribed(few.jobs[2], "1") and not oversubscribed(few.jobs[0], "1")


def test_jobs_that_compute_in_different_ways_are_on_different_lines_which_say_in_what():
    made = [{"ddp": Ddp(bucket_cap_mb=size), "sync_bn": sync} for size in (25.0, 1.0) for sync in (False, True)]
    jobs = [job_of(4 * r + n, nprocs=(1, 2)[r], seed=r, **settings) for r in range(2) for n, settings in enumerate(made)]
    panel = axes_of(drawn(sweep_report("f", jobs, MACHINE))["scaling"])
    names = [text.get_text() for text in panel.get_legend().get_texts()]
    assert len(names) == 4 and names[1] == "mnist spawn, batch 32, sync_bn=true, ddp.bucket_cap_mb=25.0"
    uneven = [replace_plan(job_of(0), threads=2), job_of(1, nprocs=2)]
    assert "batch 32, threads 2 / 1: " in drawn(sweep_report("f", uneven, MACHINE))["scaling"].alt


def replace_plan(job, **fields):
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, **fields))


def test_scaling_needs_two_rank_counts_and_tells_weak_from_strong():
    same = sweep_report("f", [job_of(0, "spawn", 2), job_of(1, "launch", 2)], MACHINE)
    assert "scaling" not in drawn(same)
    weak = sweep_report("f", [job_of(0, nprocs=1, global_batch_size=32), job_of(1, nprocs=2, global_batch_size=64)], MACHINE)
    assert axes_of(drawn(weak)["scaling"]).get_title("left") == "Weak: the local batch stays"
    assert axes_of(drawn(four_jobs("f"))["scaling"]).get_title("left") == "Strong: the global batch stays"


def test_the_fault_matrix_is_drawn_only_where_there_are_faults():
    sweep = four_jobs("f")
    assert fault_matrix(sweep) is None
    faults = {"skip_allreduce": {"R4": "failed", "R0": "passed"}, "same_shard": {"R1": "failed", "R4": "not checked"}}
    with styled():
        drawing = fault_matrix(dataclasses.replace(sweep, faults=faults))
    assert "skip_allreduce: R4" in drawing.alt and "same_shard: R1" in drawing.alt
    assert {"skip_allreduce", "same_shard", "R4"} <= set(all_texts(drawing))


def test_one_job_with_faults_gets_pictures_too(tmp_path):
    sweep = sweep_report(str(tmp_path), [job_of(0)], MACHINE)
    Pictures(min_jobs=2).report(sweep)
    assert read_pictures(tmp_path) == []
    Pictures(min_jobs=2).report(dataclasses.replace(sweep, faults={"not_sharded": {"R1": "failed"}}))
    assert "faults" in [picture.name for picture in read_pictures(tmp_path)]


def test_the_time_line_has_a_row_for_each_rank():
    drawing = drawn(four_jobs("f"))["time-line"]
    assert len(axes_of(drawing).get_yticklabels()) == 1 + 1 + 2 + 2


def test_a_hundred_jobs_give_pictures_of_bounded_size(tmp_path):
    found = drawn(hundred_jobs(tmp_path))
    assert all(drawing.figure.get_size_inches()[1] <= 20 for drawing in found.values())
    assert "first 40 of 99 jobs" in axes_of(found["step-times"]).get_title("left")
    assert any("other jobs" in text for text in all_texts(found["loss"]))


def test_nothing_is_drawn_of_nothing():
    sweep = four_jobs("f")
    jobs = tuple(dataclasses.replace(job, result=failed_result()) for job in sweep.jobs)
    assert drawn(dataclasses.replace(sweep, jobs=jobs)) == {}


def test_svg_ids_get_a_prefix():
    inside = '<g id="a" clip-path="url(#b)"/><use xlink:href="#a"/>'
    svg = f'<?xml version="1.0"?>\n<svg width="5pt" height="6pt" viewBox="0 0 5 6">{inside}</svg>'
    made = for_page(svg, "loss")
    assert made.startswith("<svg viewBox=") and 'id="loss-a"' in made and "url(#loss-b)" in made and '"#loss-a"' in made


@pytest.mark.parametrize(("count", "most"), [(5, 10), (1000, 10), (11, 10)])
def test_thinning_keeps_both_ends(count, most):
    chosen = thinned(count, most)
    assert chosen[0] == 0 and chosen[-1] == count - 1 and len(chosen) <= most and chosen == sorted(set(chosen))


# Colours: the difference that is left under each kind of colour blindness (Vienot, Brettel and Mollon, 1999).


def linear(colour):
    return [((int(colour[i : i + 2], 16) / 255 + 0.055) / 1.055) ** 2.4 for i in (1, 3, 5)]


def luminance_free(colour, kind):
    """Return what a dichromat sees, as linear RGB."""
    r, g, b = linear(colour)
    if kind == "protan":
        return [0.1121 * r + 0.8853 * g - 0.0005 * b, 0.1127 * r + 0.8897 * g - 0.0001 * b, 0.0045 * r + 0.0085 * g + b]
    return [0.2920 * r + 0.7054 * g - 0.0003 * b, 0.2934 * r + 0.7089 * g, -0.0210 * r + 0.0256 * g + 0.9886 * b]


@pytest.mark.parametrize("kind", ["protan", "deutan"])
def test_colour_blind_people_can_tell_all_lines_apart_by_colour_or_dashes(kind):
    for one, other in itertools.combinations(map(line, range(charts.MOST_LINES)), 2):
        seen = [luminance_free(look["color"], kind) for look in (one, other)]
        distance = sum((x - y) ** 2 for x, y in zip(*seen, strict=True)) ** 0.5
        assert distance > 0.12 or one["linestyle"] != other["linestyle"], f"{one} and {other} look alike ({kind})"
    assert {line(number)["color"] for number in range(charts.MOST_LINES)} == set(SERIES) and GREY not in SERIES


def test_every_mark_of_a_rank_is_a_phase():
    sources = [path.read_text() for path in Path(harness.__file__).parent.rglob("*.py")]
    marked = {name for source in sources for name in re.findall(r"\.mark\(\"([^\"]+)\"\)", source)}
    assert {"verified", "audited", "task loaded", "finished"} <= marked <= PHASES.keys()
