import dataclasses
import json
import math
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.compare.correctness.verdict import Verdict
from harness.report.html import Html, sweep_html
from harness.report.jsonfile import Json
from harness.report.junit import Junit, sweep_junit
from harness.report.markdown import Markdown, sweep_markdown
from harness.report.pictures import Pictures, read_pictures
from harness.report.sweep.build import sweep_report
from harness.report.sweep.checks_table import MOST_TABLES, check_tables
from harness.report.sweep.folder import read_sweep
from harness.report.sweep.notes import MOST_REMARKS
from harness.report.sweep.sweep_report import SweepReport
from harness.run.record import RankResult
from tests.reports import (
    GREEN,
    RED,
    changed,
    failed_result,
    four_jobs,
    hundred_jobs,
    job_of,
    recorded,
    result_of,
    with_verdict,
    written,
)  # fmt: skip
from tests.reports import steps as steps_of

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects what a page links to, its text, and its figures."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.texts, self.svgs, self.rows = [], [], [], [], [], 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [(tag, name, found[name]) for name in ("src", "href", "xlink:href", "data", "action") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        self.svgs += [found] if tag == "svg" else []
        self.rows += tag == "tr"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def red_and_failed(folder="f"):
    sweep = changed(four_jobs(folder), 3, result=failed_result())
    return changed(sweep, 1, correctness=with_verdict(sweep.jobs[1], GREEN, RED).correctness)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    sweep = read_sweep(recorded("four_jobs", tmp_path_factory.mktemp("files")))
    Pictures().report(sweep)
    return sweep


def test_the_page_is_one_file_without_network(drawn):
    page = Page(sweep_html(drawn))
    assert all(value.startswith("#") for _, _, value in page.links), page.links
    text = sweep_html(drawn)
    assert "@import" not in text and "<script" not in text and "url(http" not in text


def test_ids_are_unique_and_every_reference_has_its_target(drawn):
    page = Page(sweep_html(drawn))
    assert {one for one in page.ids if page.ids.count(one) > 1} == set()
    assert {value[1:] for _, _, value in page.links} <= set(page.ids)
    used = set(re.findall(r"url\(#([^)]+)\)", sweep_html(drawn)))
    assert used <= set(page.ids)


def test_pictures_have_text_alternatives_titles_and_follow_the_page(drawn):
    page = Page(sweep_html(drawn))
    assert len(page.svgs) == len(read_pictures(drawn_folder(drawn))) >= 5
    assert all(svg.get("role") == "img" and len(svg["aria-label"]) > 30 for svg in page.svgs)
    assert all("width" not in svg for svg in page.svgs)
    assert "currentColor" in sweep_html(drawn) and "prefers-color-scheme: dark" in sweep_html(drawn)
    assert "@media print" in sweep_html(drawn) and "width=device-width" in sweep_html(drawn)


def drawn_folder(sweep):
    return Path(sweep.folder)


def test_the_table_is_in_the_page(drawn):
    page = Page(sweep_html(drawn))
    assert page.rows == 5 + sum(1 + len(table.table.rows) for table in check_tables(drawn)[0])
    assert "identical to job 0" in page.texts and "equal to 1 process: 11 of 11 checks" in page.texts
    assert "2.13.0+cpu" in page.texts


def test_what_failed_is_in_the_page_and_cannot_break_it():
    text = sweep_html(red_and_failed())
    Page(text)
    assert "gradients differ &lt;b&gt;a|b&lt;/b&gt;" in text and "<b>a" not in text
    assert "Traceback" in text and "bad &lt;batch&gt; &amp;" in text
    assert "FAILED R4" in text


def test_every_check_stands_in_page_and_markdown_with_its_bound_and_whose_or_why_it_was_not_run(drawn):
    html, markdown = sweep_html(drawn), sweep_markdown(drawn)
    for check in drawn.jobs[1].correctness.checks:
        assert check.title in html and f"| {check.name} | {check.title} | {check.status} |" in markdown
        assert escape(check.detail) in html
    reduction = next(check for check in drawn.jobs[1].correctness.checks if check.name == "R4")
    assert f"| R4 | reduction | passed | {reduction.quantity:.3g} | 1 | theorem | " in markdown
    assert any(check.status == "not checked" for check in drawn.jobs[1].correctness.checks)


def test_jobs_with_the_same_checks_share_a_table_that_holds_their_worst_numbers():
    sweep = four_jobs("f")
    green = dataclasses.replace(GREEN, name="R4", quantity=0.25, threshold=1, origin="theorem")
    for number, quantity in ((0, 0.25), (1, 0.5), (3, 0.125)):
        sweep = changed(sweep, number, correctness=Verdict((GREEN, dataclasses.replace(green, quantity=quantity))))
    red, shared = check_tables(changed(sweep, 2, correctness=Verdict((GREEN, RED))))[0]
    assert (red.is_red, shared.is_red, shared.title) == (True, False, "Job 0-1, 3: not proven: 2 of 2 checks")
    assert shared.table.column("seen") == ["", "0.5"] and shared.table.column("threshold") == ["equal", "1"]
    assert red.table.rows[1][-1] == "gradients differ <b>a|b</b> at step 3, rank 1, tensor fc.weight"
    page = sweep_html(changed(sweep, 2, correctness=Verdict((GREEN, RED))))
    assert page.count('<details class="checks" open>') == page.count('<details class="checks">') == 1


def test_of_many_different_ladders_the_first_are_shown_and_the_rest_is_counted():
    jobs = [dataclasses.replace(job_of(n), correctness=Verdict((RED,))) for n in range(MOST_TABLES + 3)]
    found, rest = check_tables(SweepReport("f", tuple(jobs)))
    assert len(found) == MOST_TABLES and rest.startswith("Of 3 more jobs") and rest in sweep_html(SweepReport("f", tuple(jobs)))


def test_settings_cannot_break_the_page_or_the_markdown():
    sweep = four_jobs("f")
    jobs = [dataclasses.replace(job, overrides=(f"x=<script>|{job.plan.job}",)) for job in sweep.jobs]
    odd = dataclasses.replace(sweep, jobs=tuple(jobs))
    assert "&lt;script&gt;|0" in sweep_html(odd) and "<script" not in sweep_html(odd)
    rows = [line.replace("\\|", "") for line in sweep_markdown(odd).splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and "<script" not in "".join(rows)


def test_a_page_without_pictures_says_how_to_get_them():
    assert "python -m harness.compare f" in sweep_html(four_jobs("f"))


def test_markdown_has_the_table_and_relative_pictures(drawn):
    text = sweep_markdown(drawn)
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    assert len(rows) == 6 and len({row.count("|") for row in rows}) == 1
    assert "](pictures/loss.png)" in text and "---:" in rows[1]


def test_markdown_of_failures_keeps_its_table_whole():
    text = sweep_markdown(red_and_failed())
    assert "1 failed, 1 with a red verdict" in text
    assert "&lt;b&gt;a\\|b&lt;/b&gt;" in text


def test_json_is_strict_and_says_what_the_table_says(drawn):
    Json().report(drawn)
    text = (drawn_folder(drawn) / "report.json").read_text()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["ok"] is True and len(data["jobs"]) == 4 and data["machine"]["cores"] == "2"
    first = data["jobs"][0]
    assert first["num_measured_steps"] == 13 and first["loss"] == drawn.jobs[0].result.losses()[-1]
    assert data["jobs"][2]["identical_to"] == 0 and len(first["checks"]) > 8


def test_json_of_a_job_without_steps_has_null(tmp_path):
    Json().report(red_and_failed(str(tmp_path)))
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert data["ok"] is False
    assert data["jobs"][3]["step_s"] is None and data["jobs"][3]["status"] == "failed"
    assert data["jobs"][1]["verdict"] == "red"


def test_json_tells_a_loss_that_is_not_finite_from_one_that_is_unknown(tmp_path):
    steps = tuple(dataclasses.replace(step, loss_sum=math.inf) for step in steps_of(0, 1))
    diverged = dataclasses.replace(result_of(1), ranks=(RankResult(0, steps=steps),))
    sweep = sweep_report(str(tmp_path), [job_of(0, result=diverged), job_of(1, result=failed_result())], {})
    Json().report(sweep)
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert [job["loss"] for job in data["jobs"]] == ["Infinity", None]


def test_junit_has_an_error_for_a_failed_run_and_a_failure_for_a_red_verdict():
    suite = ElementTree.fromstring(sweep_junit(red_and_failed()))[0]
    assert suite.attrib | {"name": ""} == {"name": "", "tests": "4", "failures": "1", "errors": "1", "skipped": "0"}
    cases = suite.findall("testcase")
    assert [len(case.findall("error")) for case in cases] == [0, 0, 0, 1]
    assert [len(case.findall("failure")) for case in cases] == [0, 1, 0, 0]
    assert cases[3].find("error").attrib["message"].startswith("rank 1 of 2 failed at step 7")
    assert r"\x1b[31mred" in cases[3].find("error").text, "what XML cannot hold is written out"
    assert cases[0].attrib["name"] == "0 launcher=spawn,nprocs=1" and float(cases[0].attrib["time"]) == 3.0


def test_junit_of_a_run_that_its_red_verdict_stopped_is_a_failure():
    sweep = red_and_failed()
    stopped = changed(sweep, 1, result=dataclasses.replace(sweep.jobs[1].result, status="failed", message="red"))
    suite = ElementTree.fromstring(sweep_junit(stopped))[0]
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("1", "1")
    assert [child.tag for child in suite.findall("testcase")[1]] == ["failure", "system-out"]


def test_a_sweep_of_100_jobs_is_reported_and_reads_well(tmp_path):
    sweep = hundred_jobs(tmp_path / "sweep")
    written(sweep)
    read = read_sweep(tmp_path / "sweep")
    read = changed(read, 42, correctness=sweep.jobs[42].correctness)
    for reporter in (Pictures(), Html(), Markdown(), Json(), Junit()):
        reporter.report(read)
    text = (tmp_path / "sweep" / "report.html").read_text()
    assert len(text) < 2_000_000
    page = Page(text)
    assert page.rows == 101 + 3
    assert "100 jobs, 1 failed, 1 with a red verdict." in page.texts
    remarks = sum(len(job["remarks"]) for job in json.loads((tmp_path / "sweep" / "report.json").read_text())["jobs"])
    assert f"{remarks - MOST_REMARKS} more remarks on single jobs stand in report.json." in page.texts
    assert 'class="wide long"' in text
    assert {picture.name for picture in read_pictures(tmp_path / "sweep")} >= {"loss", "start-up", "step-times", "scaling"}


def test_a_sweep_where_everything_failed_is_reported_too(tmp_path):
    sweep = four_jobs(str(tmp_path))
    sweep = dataclasses.replace(sweep, jobs=tuple(dataclasses.replace(job, result=failed_result()) for job in sweep.jobs))
    for reporter in (Pictures(), Html(), Markdown(), Json(), Junit()):
        reporter.report(sweep)
    assert "4 jobs, 4 failed." in (tmp_path / "report.md").read_text()
    assert read_pictures(tmp_path) == []
