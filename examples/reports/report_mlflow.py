"""Results in MLflow. In your conf/report/mlflow.yaml:  defaults: [default, _self_]
reporters: {mlflow: {_target_: report_mlflow.MLflow, experiment: mnist}}             then: run.py report=mlflow"""

import mlflow

from harness.report.sweep.sweep_report import SweepReport
from harness.report.sweep.table import settings


class MLflow:
    def __init__(self, experiment: str) -> None:
        self.experiment = experiment

    def report(self, sweep: SweepReport) -> None:
        mlflow.set_experiment(self.experiment)
        for job in sweep.jobs:
            with mlflow.start_run(run_name=f"job {job.plan.job}"):
                mlflow.log_params(settings(job))
                for step, loss in enumerate(job.result.losses()):
                    mlflow.log_metric("loss", loss, step=step)
