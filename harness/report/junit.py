"""``junit.xml``: each job as a test, for build servers. A failed run is an error, a red verdict a failure."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

from harness.compare.correctness.check import Check
from harness.report.sweep import table as tables
from harness.report.sweep import times
from harness.report.sweep.notes import failed_launches
from harness.report.sweep.sweep_report import JobReport, SweepReport
from harness.run.folder import write_whole
from harness.run.visible import visible


class Junit:
    """Writes ``junit.xml`` into the sweep's folder."""

    def report(self, sweep: SweepReport) -> None:
        """Write it."""
        write_whole(Path(sweep.folder) / "junit.xml", sweep_junit(sweep))


def sweep_junit(sweep: SweepReport) -> str:
    """Return the report of a sweep as JUnit's XML."""
    # Build servers read these sums in the head, some of them without looking at the cases.
    failures = sum(_red(job) is not None for job in sweep.jobs)
    errors = sum(_red(job) is None and not tables.is_well(job) for job in sweep.jobs)
    counts = {"tests": len(sweep.jobs), "failures": failures, "errors": errors, "skipped": 0}
    numbers = {name: str(count) for name, count in counts.items()}
    suite = ElementTree.Element("testsuite", {"name": f"sweep {Path(sweep.place).name}", **numbers})
    for job in sweep.jobs:
        suite.append(_case(job, sweep))
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    # People read it too, in the artifacts of a build.
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _case(job: JobReport, sweep: SweepReport) -> ElementTree.Element:
    wall_s = times.wall_s(job)
    seconds = {} if math.isnan(wall_s) else {"time": f"{wall_s:.3f}"}
    name = f"{job.plan.job} {tables.run_name(job, sweep.jobs)}"
    # With the number, as build servers follow a test by its name from build to build, and two jobs may be called alike.
    case = ElementTree.Element("testcase", {"classname": "job", "name": name, **seconds})
    check = _red(job)
    # A red check that stopped the run is one failure, not an error beside it: build servers count a case once.
    if check is not None:
        _problem(case, "failure", f"{check.name} {check.title}: {check.detail}", str(dict(check.where or {})))
    elif job.result.status != "ok":
        _problem(case, "error", job.result.account, _trace(job))
    elif sentence := failed_launches(job):
        _problem(case, "error", sentence, sentence)
    ElementTree.SubElement(case, "system-out").text = f"{visible(job.folder)}\n{tables.verified_cell(job)}"
    return case


def _red(job: JobReport) -> Check | None:
    """Return the check that is red; it stopped the run too, where the plan is to stop then."""
    return job.correctness.failed if job.correctness is not None else None


def _problem(case: ElementTree.Element, kind: str, message: str, text: str) -> None:
    ElementTree.SubElement(case, kind, {"message": message, "type": kind}).text = text


def _trace(job: JobReport) -> str:
    traces = [rank.failure.traceback for rank in job.result.ranks if rank.rank == job.result.failed_rank and rank.failure]
    return traces[0] if traces else job.result.account
