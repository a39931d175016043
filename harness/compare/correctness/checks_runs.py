"""Digests of runs: rank against rank, launcher against launcher, resumed against whole, trained against verified.

A chain is what one rank left: a list of mappings with ``done``, the number of steps taken, and a digest for each kind of
thing, in causal order. A digest is a string, or a mapping from tensor to string. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.compare.correctness.agreement import odd_rank, plural, same, without
from harness.compare.correctness.check import Check, Mismatch, conclude, failed, not_checked, settle
from harness.compare.correctness.checks import ALONE
from harness.compare.correctness.evidence import Digests, Evidence
from harness.compare.plans import require_same_training
from harness.run.folder import RunDir
from harness.run.launch_methods import traits_of
from harness.run.plan import RunPlan
from harness.run.record import RunResult, joined

Chain = Sequence[Mapping[str, Any]]

_KINDS = ("parameters", "buffers", "optimizer")
"""Of digests that a training leaves."""

RESUMES = ("full", "audit")
"""Tiers in which a training is interrupted and resumed for a comparison (R12)."""


# --- R6: rank against rank -------------------------------------------------------------------------------------------


def compare_ranks(ranks: Sequence[Chain], synchronised: bool) -> Check:
    """Return R6 of a whole training: its ranks are equal wherever they left digests.

    Args:
        ranks: Their chains, of one run (:func:`chains_of`).
        synchronised: Whether BatchNorm's buffers must agree too; else they are each rank's own between two forwards.
    """
    if len(ranks) == 1:
        return not_checked("R6", ALONE)
    if not _dones(ranks):
        return not_checked("R6", "the training left no digests")
    kinds = [kind for kind in _KINDS if synchronised or kind != "buffers"]
    detail = f"{' and '.join(kinds)} of {plural(len(ranks), 'rank')} are equal in bits, after {_after(_dones(ranks))}"
    return conclude("R6", _drifting(ranks, kinds), detail)


def are_all_synchronised(evidence: Evidence) -> bool:
    """Return whether all buffers of a training must be equal on its ranks: none belongs to a layer that is not synchronised."""
    # Evidence without names is of a model all of whose buffers are synchronised, if any is.
    names = evidence.get("synchronised")
    return evidence["sync_bn"] and (names is None or set(names) >= set(evidence["steps"][0]["buffers"][0]))


def _drifting(ranks: Sequence[Chain], kinds: Sequence[str]) -> Iterator[Mismatch]:
    for done in sorted(_dones(ranks)):
        for kind in kinds:
            # A rank that left nothing after this step lacks the digest: silence is no agreement.
            values = [_link_at(chain, done).get(kind) or "" for chain in ranks]
            odd = odd_rank(values)
            if "" in values:
                yield Mismatch("it left no such digest", *_place(kind, done), values.index(""))
            elif odd is not None:
                yield Mismatch("the bits differ from the other ranks'", *_place(kind, done), odd)


# --- R10 and R12: run against run ------------------------------------------------------------------------------------


def compare_runs(plan_a: RunPlan, result_a: RunResult, plan_b: RunPlan, result_b: RunResult) -> Check:
    """Return R10 for two runs of one training.

    Raises:
        NotComparable: They differ in more than how they were started.
    """
    # Before any digest is looked at: of two different trainings equal bits would mean nothing, and different ones even less.
    require_same_training(plan_a, plan_b)
    names = (f"job {plan_a.job}", f"job {plan_b.job}")
    deterministic = plan_a.train is None or plan_a.train.deterministic
    return compare_chains(chains_of(result_a), chains_of(result_b), names, deterministic)


def compare_verifications(plan_a: RunPlan, evidence_a: Evidence, plan_b: RunPlan, evidence_b: Evidence) -> Check:
    """Return R10 for what the ranks of two runs captured of the same steps: every stage, tensor by tensor.

    Evidence whose reference is another run's holds what its own ranks captured, all the same.

    Raises:
        NotComparable: The runs differ in more than how they were started.
    """
    require_same_training(plan_a, plan_b)
    names = (f"the verification of job {plan_a.job}", f"that of job {plan_b.job}")
    return compare_chains(evidence_chains(evidence_a), evidence_chains(evidence_b), names, evidence_a["deterministic"])


def chains_of(result: RunResult) -> list[Chain]:
    """Return the chain of each rank of a run."""
    return [rank.digests for rank in result.ranks]


def evidence_chains(evidence: Evidence) -> list[Chain]:
    """Return the chain of each rank of a verification, with every stage of its steps, tensor by tensor."""
    return [[_link(evidence, index, rank) for index in range(len(evidence["steps"]))] for rank in range(evidence["nprocs"])]


def _link(evidence: Evidence, index: int, rank: int) -> dict[str, Any]:
    step = evidence["steps"][index]
    return {
        "done": step["step"] + 1,
        "rng": step["rng"][rank],
        "batch": step["batches"][rank],
        "state before": step["before"][rank],
        # repr stands in for a digest: it gives a float exactly, and tells 0.0 from -0.0.
        "loss": repr(step["losses"][rank]),
        # Backward comes to the last module first, and the first difference should be where the fault entered.
        "local gradient": dict(reversed(step["local"][rank].items())),
        "reduced gradient": dict(reversed(step["reduced"][rank].items())),
        "lr": repr(step["lr"][rank]),
        "state after": step["after"][rank],
        "buffers": step["buffers"][rank],
    }


def compare_chains(
    a: Sequence[Chain], b: Sequence[Chain], names: tuple[str, str] = ("one run", "the other"), deterministic: bool = True
) -> Check:
    """Return R10: the digests of all ranks are equal, after every step at which they were taken.

    Args:
        a: A chain for each rank, of a run (:func:`chains_of`) or of a verification (:func:`evidence_chains`).
        b: The same of the other.
        names: Of the runs, for the sentences.
        deterministic: False where kernels may differ from run to run, so that a difference accuses nobody.
    """
    # Only where both have none: where one has, the other's are missing, which is a difference.
    if not _dones(a) and not _dones(b):
        return not_checked("R10", f"neither {names[0]} nor {names[1]} left digests")
    detail = f"{names[0]} and {names[1]} left the same digests on {plural(len(a), 'rank')}, after {_after(_dones(a))}"
    return settle("R10", _differing(a, b, names), deterministic, detail)


def judge_resumed(
    plan: RunPlan, result: RunResult, run: RunDir, interrupted: RunResult | None, resumed: RunResult | None
) -> Check:
    """Return R12 of a job, by the two short runs of :mod:`harness.entrypoints.resume`; None: it came to no end."""
    why_not = why_not_resumed(plan, result, run)
    if why_not:
        return not_checked("R12", why_not)
    # In the order in which they ran: an interruption that failed explains a resumed run that found no checkpoint.
    for name, short in (("the run that was to be interrupted", interrupted), ("the resumed run", resumed)):
        if short is None:
            return not_checked("R12", f"{name} was not started, or was ended from outside")
        if short.status != "ok":
            # Red, not unchecked: a training that cannot be stopped and resumed is what R12 is to find.
            return failed("R12", Mismatch(f"{name} failed: {short.account.rstrip('.')}", "resuming"))
    assert resumed is not None
    return compare_resumed(chains_of(result), chains_of(resumed), plan.train is None or plan.train.deterministic)


def why_not_resumed(plan: RunPlan, result: RunResult, run: RunDir) -> str:
    """Return why a training cannot be interrupted and resumed for a comparison; empty where it can."""
    if traits_of(plan.method).needs_one_rank:
        return f"launcher={plan.method} has no new process that could go on"
    if len(steps_with_digests(result)) < 3:
        return "the training has too few steps to be interrupted"
    if plan.train is not None and plan.train.ddp.static_graph and plan.nprocs > 2 and plan.train.grad_accumulation == 1:
        return "ddp.static_graph=true: DDP orders its buckets after the first step, so that a resumed one adds in another order"
    if plan.overwrites_its_start(run):
        return "the training went on from a checkpoint that it has overwritten"
    return ""


def steps_with_digests(result: RunResult) -> set[int]:
    """Return the numbers of steps done at which a run left digests."""
    return {link["done"] for rank in result.ranks for link in rank.digests}


def compare_resumed(whole: Sequence[Chain], resumed: Sequence[Chain], deterministic: bool = True) -> Check:
    """Return R12: a training that was interrupted and went on has the digests of one that was not, where both left some."""
    # The resumed run knows nothing of the steps before the interruption, so that what only one side left is no difference.
    shared = _dones(whole) & _dones(resumed)
    if not shared:
        return not_checked("R12", "the whole run and the resumed one left no digests after the same step")
    expected = [_as_loaded(chain, whole[0], min(_dones(resumed))) for chain in _only(whole, shared)]
    wrong = _differing(expected, _only(resumed, shared), ("the whole run", "the resumed one"))
    return settle("R12", wrong, deterministic, f"the resumed run has the whole run's digests, after {_after(shared)}")


def _as_loaded(chain: Chain, first: Chain, done: int) -> Chain:
    """Return a rank's chain with rank 0's buffers where a checkpoint was loaded: it holds those, as forward takes them."""
    own = {kind: digest for kind, digest in _link_at(first, done).items() if kind == "buffers"}
    return [{**link, **own} if link["done"] == done else link for link in chain]


def _dones(run: Sequence[Chain]) -> set[int]:
    return {link["done"] for chain in run for link in chain}


def _only(run: Sequence[Chain], dones: set[int]) -> list[Chain]:
    return [[link for link in chain if link["done"] in dones] for chain in run]


def _after(dones: set[int]) -> str:
    return f"{', '.join(map(str, sorted(dones)))} steps"


def _differing(a: Sequence[Chain], b: Sequence[Chain], names: tuple[str, str]) -> Iterator[Mismatch]:
    """Yield what differs, in causal order: by step, then by kind, then by rank."""
    if len(a) != len(b):
        yield Mismatch(f"{names[0]} has {plural(len(a), 'rank')}, and {names[1]} has {len(b)}", "ranks")
        return
    for done in sorted(_dones(a) | _dones(b)):
        pairs = [(_link_at(one, done), _link_at(other, done)) for one, other in zip(a, b, strict=True)]
        # In the chain's own order, which is causal; a set would lose it.
        kinds = dict.fromkeys(kind for pair in pairs for link in pair for kind in link)
        # Where neither side left a kind, the word stands in for one, so that a step without digests differs instead of passing.
        for kind in [kind for kind in kinds if kind not in ("done", "event")] or ["digests"]:
            for rank, (one, other) in enumerate(pairs):
                if not _agree(one.get(kind), other.get(kind)):
                    yield _difference(one.get(kind), other.get(kind), kind, done, rank, names)


def _link_at(chain: Chain, done: int) -> Mapping[str, Any]:
    # Empty and not None, so that each of its kinds is missing by itself.
    return next((link for link in chain if link["done"] == done), {})


def _difference(mine: object, theirs: object, kind: str, done: int, rank: int, names: tuple[str, str]) -> Mismatch:
    seen = f"the bits of {names[0]} and {names[1]} differ"
    if mine is None or theirs is None:
        seen = f"{names[0] if mine is None else names[1]} left no such digest"
    return Mismatch(seen, *_place(kind, done), rank, _tensor(mine, theirs))


def _place(kind: str, done: int) -> tuple[str, int]:
    """Return stage and step of a digest that was taken after so many steps."""
    return (kind, done - 1) if done else (f"{kind} at birth", 0)


def _agree(mine: object, theirs: object) -> bool:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        # The order of names counts: it is that of the model, and with it of backward and of the optimizer's state.
        return list(mine) == list(theirs) and all(same(mine[name], theirs[name]) for name in mine)
    return same(mine, theirs)


def _tensor(mine: object, theirs: object) -> str | None:
    if not (isinstance(mine, Mapping) and isinstance(theirs, Mapping)):
        return None
    return next((name for name in dict.fromkeys((*mine, *theirs)) if not same(mine.get(name), theirs.get(name))), None)


# --- R13: the training against its verification ----------------------------------------------------------------------


def compare_observed(evidence: Evidence, rank_digests: Sequence[Chain]) -> Check:
    """Return R13: the training's first steps come to what was verified, on all ranks.

    The training's digests are each one for all parameters, all buffers and all optimizer state
    (:func:`harness.run.record.joined`); here the verified ones are joined by kind, as ``kind_digests`` does.
    """
    if evidence.get("data_goes_on"):
        return not_checked("R13", "the data set has a generator of its own, which goes on from where the verification left it")
    verified = [_verified(evidence, rank) for rank in range(evidence["nprocs"])]
    shared = _dones(verified) & _dones(rank_digests)
    if not shared:
        return not_checked("R13", "the training left no digests of the steps that were verified")
    trained = [[_only_kinds(link) for link in chain] for chain in _only(rank_digests, shared)]
    wrong = _differing(_only(verified, shared), trained, ("what was verified", "the training"))
    detail = f"the training has the digests of what was verified, after {_after(shared)}"
    return settle("R13", wrong, evidence["deterministic"], detail)


def _only_kinds(link: Mapping[str, Any]) -> dict[str, Any]:
    # A kind that the training did not leave becomes None, which agrees with nothing.
    return {"done": link["done"], **{kind: link.get(kind) for kind in _KINDS}}


def _verified(evidence: Evidence, rank: int) -> list[dict[str, Any]]:
    steps = evidence["steps"]
    born = evidence["birth"][rank]
    chain = []
    if steps and steps[0]["step"] == 0:
        # A buffer that forward makes in the first step is not there at birth.
        buffers = {name: born[name] for name in steps[0]["buffers"][rank] if name in born}
        chain.append(by_kind(0, without(born, buffers), buffers, steps[0]["reduced"][rank]))
    return chain + [by_kind(s["step"] + 1, s["after"][rank], s["buffers"][rank], s["reduced"][rank]) for s in steps]


def by_kind(done: int, state: Digests, buffers: Digests, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return a link of a chain as the recorder leaves it.

    Args:
        state: Parameters and optimizer state; the latter's names start with ``optimizer.``, which a module may be called too.
        trained: Names that are certainly parameters.
    """
    optimizer = {name: digest for name, digest in state.items() if name.startswith("optimizer.") and name not in trained}
    return {
        "done": done,
        "parameters": joined(without(state, optimizer)),
        "buffers": joined(buffers),
        "optimizer": joined(optimizer),
    }
