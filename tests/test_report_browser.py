"""What people see, in a real browser: TensorBoard on a sweep's folder, and the page."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from harness.report.html import Html
from harness.report.pictures import Pictures
from harness.report.sweep import times
from harness.report.sweep.folder import read_sweep
from harness.report.tensorboard import TensorBoard
from harness.run.folder import RunDir
from harness.run.job import Job
from tests.browser import MISSING, Browser, is_there
from tests.processes import PATIENCE_S
from tests.reports import hundred_jobs, job_of, recorded, written

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_there() and os.environ.get("CI") != "true", reason=MISSING)]

TEXT = """
const walk = node => (node.shadowRoot ? walk(node.shadowRoot) : '') + (node.nodeType === 3 ? node.textContent + ' ' : '') +
  (['STYLE', 'SCRIPT'].includes(node.nodeName) ? '' : [...node.childNodes].map(walk).join(''));
return walk(document.body).replace(/\\s+/g, ' ');
"""
"""All text of a page, that in shadow roots too."""


@pytest.fixture
def browser(tmp_path):
    assert is_there(), MISSING
    with Browser(tmp_path) as made:
        made.shots = tmp_path
        yield made


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    sweep = read_sweep(recorded("four_jobs", tmp_path_factory.mktemp("seen")))
    for reporter in (Pictures(), TensorBoard(), Html()):
        reporter.report(sweep)
    return sweep


@pytest.fixture(scope="module")
def board(sweep):
    with tensorboard(Path(sweep.folder).parent) as url:
        yield url


@contextlib.contextmanager
def tensorboard(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([*command, "--reload_interval", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(lambda: len(urllib.request.urlopen(f"{url}/data/runs").read()) > 4)
        yield url
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def _wait(ready):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if ready():
                return
        time.sleep(0.2)
    raise TimeoutError


def look(browser, url, tab, words):
    """Open a tab of TensorBoard and wait until it shows all the words; return its text."""
    browser.open(f"{url}/?tab={tab}#{tab}", 1600, 1400)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        text = browser.run(TEXT)
        missing = [word for word in words if word not in text]
        if not missing or time.monotonic() > deadline:
            browser.screenshot(browser.shots / f"{tab}.png")
            assert missing == [], f"{tab} shows {text[:2000]}"
            return text
        time.sleep(0.5)


def test_tensorboard_shows_what_the_records_say(browser, board, sweep):
    look(browser, board, "scalars", ["accuracy/eval", "final/first_step_s", "launcher=launch,nprocs=2"])
    charts = ["mnist on 1 rank", "mnist on 2 ranks", "step time, ms", "samples per second", "Matches (2)"]
    look(browser, board, "custom_scalars", charts)
    look(browser, board, "text", ["equal to 1 process: 11 of 11 checks", "identical to job 1"])
    look(browser, board, "images", ["pictures/Start-up", "pictures/Scaling"])
    firsts = [format(times.first_step_s(job), "#.5g") for job in sweep.jobs]
    look(browser, board, "hparams", ["launcher", "nprocs", "spawn", "launch", "final/first_step_s", *firsts])


def test_tensorboard_follows_a_job_that_runs(browser, tmp_path):
    job = job_of(0, nprocs=2)
    with running(tmp_path / "outputs", job) as (step, folder), tensorboard(folder) as url:
        look(browser, url, "scalars", ["loss/train", "launcher=spawn,nprocs=2"])
        before = last_step(url)
        for number in range(5, 12):
            step(number)
        _wait(lambda: last_step(url) > before)
        assert (before, last_step(url)) == (4, 11)


@contextlib.contextmanager
def running(folder, job):
    """Let a job run as far as step 4; yield what lets it do another step, and where TensorBoard finds it."""
    board = TensorBoard()
    started = Job(job.plan, RunDir(folder / "0"), job.overrides, job.label)
    board.begin(str(folder), [started])
    board.started(started)

    def step(number):
        for rank in job.result.ranks:
            board.event(rank.rank, {"event": "step", **vars(rank.steps[number])})

    for number in range(5):
        step(number)
    yield step, folder
    board.ended(started, job.result)


def last_step(url):
    run = "0%2Flauncher%3Dspawn%2Cnprocs%3D2"
    answer = urllib.request.urlopen(f"{url}/data/plugin/scalars/scalars?tag=loss%2Ftrain&run={run}")
    return json.load(answer)[-1][1]


@pytest.mark.parametrize(("width", "scheme", "paper"), [(1200, "light", 255), (390, "dark", 23)])
def test_the_page_fits_the_screen_and_follows_its_scheme(browser, sweep, width, scheme, paper):
    browser.media(scheme)
    browser.open(f"file://{sweep.folder}/report.html", width, 844)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert background.startswith(f"rgb({paper}")
    ink = "return getComputedStyle(document.querySelector('svg text')).fill"
    assert browser.run(ink) == browser.run("return getComputedStyle(document.body).color")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    browser.media("light")


def test_the_page_prints(browser, sweep):
    browser.open(f"file://{sweep.folder}/report.html")
    browser.pdf(browser.shots / "report.pdf")
    assert (browser.shots / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_hundred_jobs_open_at_once(browser, tmp_path):
    sweep = hundred_jobs(tmp_path / "sweep")
    written(sweep)
    for reporter in (Pictures(), Html()):
        reporter.report(sweep)
    browser.open(f"file://{tmp_path}/sweep/report.html", 1200, 900)
    seconds = browser.run("const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd / 1000")
    assert seconds < 5
    assert browser.run("return document.querySelectorAll('#jobs tbody tr').length") == 100
