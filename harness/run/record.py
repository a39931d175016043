"""What a run leaves: plain, frozen data, with a format number. Nothing here knows files or processes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.errors import NotComparable

FORMAT = 1
"""Number of the record format; a reader refuses records of a higher one."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, as one rank saw it.

    Attributes:
        step: Counted from 0 over the whole run.
        loss_sum: Sum of the losses of this rank's samples (or tokens).
        count: Number of samples (or tokens) in ``loss_sum``.
        lr: Learning rate of the first parameter group in this step.
        seconds: From taking the batch to the end of the optimizer's step; the records themselves are outside.
        t: CLOCK_MONOTONIC at its end, in seconds.
        skipped: True where the step was left out on all ranks, because a loss was not finite.
        compute_s: Forward and backward of this rank alone, as DDP measures it; None where it does not.
        comm_exposed_s: Time of the reduction that the backward did not hide; None where DDP does not measure it.
        samples: Number of this rank's samples in it; None in records of before it was counted.
        delay_s: Part of ``seconds`` in which the rank was ready and the kernel gave the core to others; None if not counted.
    """

    step: int
    loss_sum: float
    count: float
    lr: float
    seconds: float
    t: float
    skipped: bool = False
    delay_s: float | None = None
    compute_s: float | None = None
    comm_exposed_s: float | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Evaluation:
    """Metrics over all samples, counted once each: name -> (sum, count), the same on every rank."""

    step: int
    metrics: Mapping[str, tuple[float, float]]

    def means(self) -> dict[str, float]:
        """Return each metric's mean; NaN where nothing was counted."""
        return {name: total / count if count else float("nan") for name, (total, count) in self.metrics.items()}


@dataclass(frozen=True)
class Scalar:
    """A number that the user's own code has logged on one rank, at a step counted from 0."""

    name: str
    step: int
    value: float


@dataclass(frozen=True)
class Failure:
    """An exception as text, so that one that cannot be pickled is reported as well.

    Attributes:
        type: Name of its class.
        message: Its text.
        where: ``file:line`` of the innermost frame of the user's own code.
        traceback: Python's own text.
        collective: True where it was raised by communication with other ranks, so that it may be a consequence.
        t: CLOCK_MONOTONIC when it was caught, in seconds.
        cause: Type and text of what it was raised from, first of all; empty where ``message`` tells that too.
        mistake: True where the message alone says what to mend, so that rank, line and traceback would only hide it.
    """

    type: str
    message: str
    where: str
    traceback: str
    collective: bool
    t: float
    mistake: bool = False
    cause: str = ""


@dataclass(frozen=True)
class RankResult:
    """All that one rank recorded.

    Attributes:
        marks: Name of a phase -> CLOCK_MONOTONIC at its end, in seconds.
        meters: :class:`harness.training.meter.Reading` as plain data, at the end of the warm-up and after the last step.
        facts: What this rank saw: world size, backend, device, threads, versions, ...
        status: ``ok``, ``raised``, ``exit`` (``sys.exit``), or ``unfinished``, where the record has no end.
        code: The exit code that the task asked for.
    """

    rank: int
    pid: int | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    digests: tuple[Mapping[str, Any], ...] = ()
    meters: tuple[Mapping[str, Any], ...] = ()
    status: str = "unfinished"
    code: int = 0
    failure: Failure | None = None
    value: Any = None
    t_end: float | None = None

    @classmethod
    def from_events(cls, rank: int, events: Iterable[Mapping[str, Any]]) -> RankResult:
        """Join the events of one ``rank-N.jsonl``.

        Raises:
            NotComparable: A newer harness has written them.
        """
        fields: dict[str, Any] = {"rank": rank}
        marks: dict[str, float] = {}
        facts: dict[str, Any] = {}
        lists: dict[str, list[Any]] = {"step": [], "evaluation": [], "scalar": [], "digest": [], "meter": []}
        for event in events:
            body = {key: value for key, value in event.items() if key != "event"}
            # Kinds that are not here, as log, were for whoever watched the rank.
            match event["event"]:
                case "start":
                    check_format(event, f"rank-{rank}.jsonl")
                    fields["pid"] = body["pid"]
                    marks.update(body["marks"])
                case "mark":
                    marks[body["name"]] = body["t"]
                case "facts":
                    facts.update(body)
                case "step":
                    lists["step"].append(Step(**body))
                case "evaluation":
                    metrics = {name: (float(pair[0]), float(pair[1])) for name, pair in body["metrics"].items()}
                    lists["evaluation"].append(Evaluation(body["step"], metrics))
                case "scalar":
                    lists["scalar"].append(Scalar(**body))
                case "digest" | "meter" as kind:
                    lists[kind].append(body)
                case "end":
                    failure = Failure(**body["failure"]) if body["failure"] else None
                    fields.update(status=body["status"], code=body["code"], failure=failure, t_end=body["t"])
                    fields["value"] = body["value"]
        return cls(
            **fields,
            marks=marks,
            facts=facts,
            steps=tuple(lists["step"]),
            evaluations=tuple(lists["evaluation"]),
            scalars=tuple(lists["scalar"]),
            digests=tuple(lists["digest"]),
            meters=tuple(lists["meter"]),
        )


@dataclass(frozen=True)
class RunResult:
    """One run, as all of its ranks saw it.

    Attributes:
        status: ``ok`` or ``failed``.
        message: For a failed run, the sentence that names rank and cause.
        see: Where to look for more: ``Traceback: PATH`` and its kin; empty where nothing is to be found.
        failed_rank: The rank that fell first; None where none can be named.
        consequences: Ranks whose errors followed from it.
        exit_code: Of the failed rank; None where a signal ended it.
        signal: That ended the failed rank.
        marks: CLOCK_MONOTONIC of the parent's own marks (``called``, ``started``, ``returned``), in seconds.
    """

    status: str
    ranks: tuple[RankResult, ...]
    message: str = ""
    failed_rank: int | None = None
    consequences: tuple[int, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    see: str = ""

    @property
    def account(self) -> str:
        """The message, and where to look for more."""
        return f"{self.message} {self.see}".strip()

    def losses(self) -> list[float]:
        """Return the loss of each step over all ranks: the sum of the sums by the sum of the counts."""
        steps = zip(*(rank.steps for rank in self.ranks), strict=False)
        # Up to the shortest: ranks that were stopped have recorded different numbers of steps.
        return [ratio(sum(s.loss_sum for s in parts), sum(s.count for s in parts)) for parts in steps]

    def scalars(self) -> dict[str, dict[int, float]]:
        """Return name -> step -> value of what the user's code has logged: the mean of the ranks that logged it there."""
        values: dict[str, dict[int, list[float]]] = {}
        for scalar in (scalar for rank in self.ranks for scalar in rank.scalars):
            values.setdefault(scalar.name, {}).setdefault(scalar.step, []).append(scalar.value)
        return {name: {step: sum(of) / len(of) for step, of in sorted(steps.items())} for name, steps in values.items()}

    def step_seconds(self) -> list[float]:
        """Return the time of each step in seconds: the slowest rank's."""
        # The others wait for it in the reduction.
        return [max(s.seconds for s in parts) for parts in zip(*(rank.steps for rank in self.ranks), strict=False)]

    def step_samples(self, nominal: int) -> list[int]:
        """Return how many samples each step trained over all ranks; ``nominal`` where that was not recorded."""
        steps = zip(*(rank.steps for rank in self.ranks), strict=False)
        return [samples_of((step.samples for step in parts), nominal) for parts in steps]

    def first_step_s(self) -> float | None:
        """Return the time from the call to the end of the first step on all ranks, in seconds; None without one."""
        if not self.ranks or any(not rank.steps for rank in self.ranks):
            return None
        # CLOCK_MONOTONIC is one for all processes of a machine, so that a rank's reading can follow the parent's.
        return max(rank.steps[0].t for rank in self.ranks) - self.marks["called"]


def joined(digests: Mapping[str, str]) -> str:
    """Return one digest for named ones: the first 16 hexadecimal digits of SHA-256 over ``name:digest;``, in their order."""
    # 16 digits are 64 bits: short enough to be shown, and far more than two trainings can share by chance.
    return hashlib.sha256("".join(f"{name}:{digest};" for name, digest in digests.items()).encode()).hexdigest()[:16]


def samples_of(parts: Iterable[int | None], nominal: int) -> int:
    """Return the samples of one step over all ranks; ``nominal``, the global batch size, where a rank did not record its own.

    The last batch of an epoch is smaller than the others, and a recipe's own batches are as it likes.
    """
    counts = [count for count in parts if count is not None]
    return sum(counts) or nominal


def ratio(total: float, count: float) -> float:
    """Return ``total / count``; NaN where nothing was counted."""
    return total / count if count else float("nan")


def to_json(record: Any) -> dict[str, Any]:
    """Return a dataclass of this file as plain data, with the format number."""
    return {"format": FORMAT, **dataclasses.asdict(record)}


def check_format(data: Mapping[str, Any], name: object) -> None:
    """See to it that this harness can read a record.

    Args:
        name: The record's file.

    Raises:
        NotComparable: A newer harness has written it.
    """
    # Ranks that wrote none wrote the first.
    if data.get("format", 1) > FORMAT:
        raise NotComparable(f"{name} has format {data['format']}, and this harness reads up to {FORMAT}: update it.")


def run_result_from_json(data: Mapping[str, Any]) -> RunResult:
    """Return the RunResult that :func:`to_json` wrote."""
    fields = {key: value for key, value in data.items() if key != "format"}
    fields["ranks"] = tuple(_rank_from_json(rank) for rank in data["ranks"])
    fields["consequences"] = tuple(data["consequences"])
    return RunResult(**fields)


def _rank_from_json(data: Mapping[str, Any]) -> RankResult:
    fields = dict(data)
    fields["steps"] = tuple(Step(**step) for step in data["steps"])
    fields["evaluations"] = tuple(
        Evaluation(e["step"], {name: (pair[0], pair[1]) for name, pair in e["metrics"].items()}) for e in data["evaluations"]
    )
    # Records of before there were any have none.
    fields["scalars"] = tuple(Scalar(**scalar) for scalar in data.get("scalars", ()))
    fields["digests"] = tuple(data["digests"])
    fields["meters"] = tuple(data["meters"])
    fields["failure"] = Failure(**data["failure"]) if data["failure"] else None
    return RankResult(**fields)
