"""Evidence of an earlier run, which stands for this one's where the ranks have captured the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.compare.correctness.evidence import Mathematics, Schedule, StepEvidence
from harness.run.folder import read_json
from harness.training.digest import Digests
from harness.verify.reference.evaluation import Metrics

CAPTURED = ("lr", "rng", "device_rng", "batches", "before", "losses", "local", "reduced", "after", "buffers")
"""What the ranks alone say of a step; where it is the same, so is all that the reference says."""


class SharedEvidence:
    """An ``evidence.json`` that was read back. Without one it is empty, and nothing is the same."""

    def __init__(self, evidence: Mapping[str, Any] | None = None) -> None:
        self._evidence: Mapping[str, Any] = evidence or {}

    @classmethod
    def read(cls, path: str | None) -> SharedEvidence:
        """Return the evidence at ``path``; an empty one where there is none."""
        # The run that was to write it may have failed before.
        return cls(read_json(Path(path))) if path is not None and Path(path).exists() else cls()

    def has_birth(self, birth: list[Digests]) -> bool:
        """Return whether that run began in the same bits."""
        # Each tensor's digest on each rank: with other weights even equal losses would be chance.
        return bool(self._evidence.get("birth") == birth)

    @property
    def reference_birth(self) -> tuple[Digests, bool]:
        """The reference's state at step 0, and whether it has BatchNorm."""
        return self._evidence["reference_birth"], self._evidence["has_batch_norm"]

    def step(self, captured: StepEvidence) -> StepEvidence | None:
        """Return the evidence of a step in which the ranks captured the same bits; None where there is none."""
        for step in self._evidence.get("steps", []):
            if all(step[key] == captured[key] for key in CAPTURED) and step["loss"]["ranks"] == captured["loss"]["ranks"]:  # type: ignore[literal-required]
                twin: StepEvidence = step
                return twin
        return None

    def evaluation(self, reported: Metrics) -> tuple[Metrics, list[Metrics] | None] | None:
        """Return what the reference came to where the ranks reported the same: its metrics, and those of other draws."""
        if self._evidence.get("evaluation") != reported:
            return None
        return self._evidence["reference_evaluation"] or {}, self._evidence.get("evaluated_again")

    @property
    def uses_random(self) -> bool:
        """Whether forward draws random numbers."""
        return bool(self._evidence["uses_random"])

    @property
    def data_goes_on(self) -> bool:
        """Whether the data set has generators of its own, from which the verification has drawn."""
        return bool(self._evidence.get("data_goes_on", False))

    @property
    def schedule(self) -> Schedule | None:
        """How the learning rates to come compare."""
        return self._evidence.get("schedule")

    @property
    def mathematics(self) -> tuple[list[Mathematics] | None, list[Mathematics] | None, str]:
        """The whole batch in the run's own precision, in float64, and why it was not compared."""
        return self._evidence["own_precision"], self._evidence["float64"], self._evidence["not_mathematics"]
