"""Results in Weights & Biases. In your conf/report/wandb.yaml:  defaults: [default, _self_]
reporters: {wandb: {_target_: report_wandb.WandB, project: mnist}}                   then: run.py report=wandb"""

import wandb

from harness.report.sweep.sweep_report import SweepReport
from harness.report.sweep.table import settings


class WandB:
    def __init__(self, project: str) -> None:
        self.project = project

    def report(self, sweep: SweepReport) -> None:
        for job in sweep.jobs:
            with wandb.init(project=self.project, name=f"job {job.plan.job}", config=dict(settings(job))) as run:
                for step, loss in enumerate(job.result.losses()):
                    run.log({"loss": loss}, step=step)
