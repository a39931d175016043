"""The pictures of a sweep, as files: ``pictures/NAME.svg`` for the page, ``pictures/NAME.png`` for everything else.

Drawing costs about a second, a third of it for importing matplotlib. That is little for a sweep and much for a single short
job, so for one job without a fault it is left to ``report=full`` and ``python -m harness.compare``. Whoever shows pictures
reads these files.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.report.sweep.sweep_report import SweepReport
from harness.run.folder import read_json, write_json
from harness.run.visible import visible

FOLDER = "pictures"


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: Of its files.
        title: What it shows, in a few words.
        alt: The same for those who cannot see it: what is drawn, and what comes out.
    """

    name: str
    title: str
    alt: str
    svg: Path
    png: Path


class Pictures:
    """Draws all pictures for which a sweep has data.

    Args:
        min_jobs: A sweep of fewer jobs gets none, unless faults were put into it: what was found is best seen.
    """

    def __init__(self, min_jobs: int = 1) -> None:
        self._min_jobs = min_jobs

    def report(self, sweep: SweepReport) -> None:
        """Draw them, in place of older ones."""
        folder = Path(sweep.folder) / FOLDER
        # Even where none are drawn: those that lie there are of another sweep.
        shutil.rmtree(folder, ignore_errors=True)
        if sum(job.plan.train is not None for job in sweep.jobs) < self._min_jobs and not sweep.faults:
            return
        # Here and not above, so that a sweep without pictures does not pay for matplotlib.
        from harness.report.figures.charts import drawings

        drawn = drawings(sweep)
        if not drawn:
            return
        folder.mkdir(parents=True)
        for drawing in drawn:
            drawing.save(folder)
        # Last: without an index there are no pictures, so that a drawing that failed half-way is shown by nobody.
        write_json(folder / "index.json", [{"name": d.name, "title": d.title, "alt": d.alt} for d in drawn])


def read_pictures(sweep: Path) -> list[Picture]:
    """Return the pictures of a sweep's folder; none where none were drawn. A link is none: it may lead to any file."""
    folder = sweep / FOLDER
    if not (folder / "index.json").exists():
        return []
    # The folder may come from elsewhere, and titles stand in a terminal or a page.
    entries = visible(read_json(folder / "index.json"))
    pictures = [
        Picture(e["name"], e["title"], e["alt"], folder / f"{e['name']}.svg", folder / f"{e['name']}.png") for e in entries
    ]
    return [picture for picture in pictures if all(_is_inside(path, sweep) for path in (picture.svg, picture.png))]


def _is_inside(path: Path, sweep: Path) -> bool:
    # resolve() follows links, in the folder's own path too, so that it is asked of both.
    return path.is_file() and path.resolve().is_relative_to(sweep.resolve())
