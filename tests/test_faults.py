"""Every fault is caught at its smallest size, and so is what a user's own code does wrong; correct runs are not accused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from harness.compare.detection import audit_lines, audit_table, trials_of
from harness.config import nodes
from harness.errors import Mismatch
from harness.rank.lifetime import used_by_multiprocessing
from harness.run.faults import FAULTS
from harness.run.folder import RunDir
from harness.run.plan import Ddp, TrainPlan
from harness.train import prepare
from harness.training.parallel.batchnorm_messages import Collective, exchanging
from harness.training.recipe import make_recipe
from harness.training.trainer import Trainer
from harness.verify import audit as audits
from harness.verify.audit import Trials
from harness.verify.faults.inject import inject
from harness.verify.faults.seams import INJECTIONS, DoesNotApply
from harness.verify.reference.batchnorm import NEEDS_PEERS
from harness.verify.reference.reference import Reference
from tests import toys
from tests.ranks import Outcomes, groups_of
from tests.toys import data, losses, models

SIZE, SIZES = 3, (2, 3, 4)
WHOLE = {"_target_": "tests.toys.Scheduled", "count": 51, "batch_norm": True, "dropout": 0.3, "dtype": "float32"}
TOKENS = {"_target_": "tests.toys.Tokens", "lengths": [5, 3, 4, 2, 6, 3, 5, 4, 2, 3, 4, 5, 6, 2, 3, 4, 5, 2], "table": "sparse"}
BATCH = 17  # 2, 3 and 4 ranks get shards of unequal size
NEEDS = {
    "accumulation_without_divisor": {"grad_accumulation": 2},
    "clipped_before_reduction": {"clip_norm": 0.05},
    "sparse_rows_lost": {"recipe": TOKENS, "global_batch_size": 6},
}

WITH_SYNC_BN = (
    "stale_buffers",
    "accumulation_without_divisor",
    "zero_grad_forgotten",
    "clipped_before_reduction",
    "bit_flipped_in_compute",
    "same_dropout_everywhere",
)
"""Faults that the replay of a single rank shows."""

BY_SIZE = {
    *("sum_instead_of_mean", "divided_twice", "unequal_shards_averaged_equally", "lr_times_ranks"),
    *("scheduler_stepped_by_each_rank", "rank0_loss_reported", "sparse_rows_lost", "accuracy_as_mean_of_means"),
    *("correct: plain", "correct: sync_bn", "correct: sparse", "correct: the number of ranks, used well"),
    *("user: loss times ranks by a bound name", "user: a schedule by the number of ranks"),
}
"""Cases that depend on the number of ranks; ``benchmarks/fault_table.py`` has every fault at every number."""


def sizes_of(case):
    return SIZES if case in BY_SIZE else (SIZE,)


def at_sizes(names, prefix=""):
    """Run a test for each name, at each of its numbers of ranks."""
    return pytest.mark.parametrize(("name", "size"), [(name, size) for name in names for size in sizes_of(f"{prefix}{name}")])


def plan_of(**settings):
    return TrainPlan(**{"recipe": WHOLE, "global_batch_size": BATCH, "steps": 8, **settings})


class Mishearing(Collective):
    """The process group, of which rank 1 hears one bit wrong."""

    def __init__(self, what):
        self.what = what

    def gather(self, values, layer):
        return self.flipped("gather", super().gather(values, layer))

    def total(self, values, layer):
        return self.flipped("total", super().total(values, layer))

    def flipped(self, what, heard):
        if what == self.what and dist.get_rank() == 1:
            # The highest bit of the mantissa: sums of more than two have an error of their own.
            bits, bit = (torch.int64, 51) if heard.dtype == torch.float64 else (torch.int32, 22)
            heard.view(bits).view(-1)[-1] ^= 1 << bit
        return heard


def mine(name, **settings):
    kind = next(getattr(module, name) for module in (data, losses, models) if hasattr(module, name))
    return {"_target_": f"{kind.__module__}.{name}", "count": 51, "dtype": "float32", **settings}


# User's recipe -> the checks of which one must be red first.
USERS = {
    "hook on rank 1": (mine("Hooked", ranks=[1]), {"R3"}),
    "hook on rank 0, where the reference runs": (mine("Hooked", ranks=[0]), {"R3"}),
    "optimizer of rank 1": (mine("OtherOptimizer"), {"R0", "R5"}),
    "data of rank 1": (mine("OtherData"), {"R1"}),
    "hidden statistics in training": (mine("HiddenStatistics", in_training=True), {"R3"}),
    "hidden statistics in evaluation": (mine("HiddenStatistics", in_training=False), {"R9"}),
    "not in the optimizer": (mine("NotInOptimizer"), {"R14"}),
    "a sum beside BatchNorm": (mine("Summed"), {"R7", "R8"}),
    "a sum beside idle BatchNorm": (mine("Summed", idle=True), {"R7", "R8"}),
    "loss times ranks": (mine("TimesRanks", what="loss"), {"R7", "R8"}),
    "lr times ranks": (mine("TimesRanks", what="lr"), {"R5"}),
    "normalised by hooks": (mine("NormalisedByHook"), {"R7", "R8"}),
    "a sum of drawn samples": (mine("Flips", sums=True), {"R7", "R8"}),
    "a sum of samples drawn by a generator of the data's": (mine("Flips", own=True, sums=True), {"R7", "R8"}),
    "a sum, and noise in forward": (mine("DrawsInForward", sums=True), {"R7", "R8"}),
    "normalised by weights of the recipe's own": (mine("OwnWeights"), {"R7", "R8"}),
    "loss times ranks by a bound name": (mine("AsksByBoundName", what="loss"), {"R7", "R8"}),
    "lr times ranks by a bound name": (mine("AsksByBoundName", what="lr"), {"R5"}),
    "a schedule by the number of ranks": (mine("AsksByBoundName", what="schedule"), {"R5"}),
    "windows of one series, the same on all ranks": (mine("SameWindows", count=48), {"R11"}),
    "noise that all ranks draw alike": (mine("DrawnData", augments="alike"), {"R11"}),
    "normalised, beside a narrow log": (mine("Logs"), {"R7", "R8"}),
}

CORRECT = {
    "plain": {},
    "learns of its data": {"recipe": mine("Learns")},
    "meets at its birth": {"recipe": mine("MeetsAtBirth")},
    "logs by a bound name": {"recipe": mine("LogsByBoundName")},
    "train() in loss()": {"recipe": mine("TrainsInLoss", batch_norm=True)},
    "drawn samples, changed in place": {"recipe": mine("Flips", together=True)},
    "the same by a generator of its own": {"recipe": mine("Flips", own=True)},
    "noise in forward": {"recipe": mine("DrawsInForward")},
    "a loss that cancels out": {"recipe": mine("CancelsOut")},
    "weights of its own": {"recipe": mine("OwnWeights", normalised=False)},
    "a centre of all ranks": {"recipe": mine("CentredOnItsOwn", reduced=True)},
    "a centre of its own": {"recipe": mine("CentredOnItsOwn", reduced=False)},
    "draws in collate()": {"recipe": mine("DrawsInCollate")},
    "likes no constants": {"recipe": mine("LikesNoConstants")},
    "trains what chance leaves": {"recipe": mine("TrainsWhatChanceLeaves")},
    "holds a group": {"recipe": mine("HoldsAGroup")},
    "freezes in optimizer()": {"recipe": mine("FreezesInOptimizer")},
    "a static graph": {"recipe": mine("Shared"), "ddp": Ddp(static_graph=True)},
    "bias before sync_bn": {"recipe": mine("BiasBeforeBatchNorm", count=48), "sync_bn": True, "global_batch_size": 12},
    "spectral norm": {"recipe": mine("Normed", count=48), "grad_accumulation": 3, "clip_norm": 0.05},
    "old spectral norm, float64": {
        "recipe": mine("Normed", old=True, count=48, dtype="float64"),
        "precision": "float64",
        "grad_accumulation": 2,
    },
    "spectral norm beside BatchNorm": {"recipe": mine("Normed", batch_norm=True)},
    "spectral norm beside BatchNorm, accumulated": {"recipe": mine("Normed", batch_norm=True), "grad_accumulation": 2},
    "spectral norm beside sync_bn": {"recipe": mine("Normed", batch_norm=True), "sync_bn": True, "grad_accumulation": 2},
    "remembers what it has seen": {"recipe": mine("Remembering"), "grad_accumulation": 2},
    "weights changed by forward": {"recipe": mine("Taught"), "grad_accumulation": 2},
    "complex buffers, made and grown ones": {"recipe": mine("Turning")},
    "InstanceNorm beside sync_bn": {"recipe": mine("InstanceNormed", count=48), "sync_bn": True, "global_batch_size": 12},
    "BatchNorm without statistics": {"recipe": mine("KeepsNoStatistics")},
    "the number of ranks, used well": {"recipe": mine("MeanBySum", count=48), "global_batch_size": 12},
    "kept in evaluation mode": {"recipe": mine("KeepsEvaluating", dropout=0.5)},
    "loss in float32": {"recipe": mine("LossInFloat32")},
    "autocast of its own": {"recipe": mine("OwnAutocast")},
    "a weight as count": {"recipe": mine("Weighted")},
    "an empty parameter": {"recipe": mine("WithEmptyParameter")},
    "vmap": {"recipe": mine("Mapped")},
    "counts what it draws": {"recipe": mine("CountsAtRandom")},
    "float64, Adam": {"precision": "float64", "recipe": {**WHOLE, "dtype": "float64", "optimizer": "adam"}},
    "bfloat16": {"precision": "bfloat16"},
    "accumulated, clipped": {"grad_accumulation": 2, "clip_norm": 0.05},
    "sync_bn": {"sync_bn": True},
    "sync_bn, accumulated": {
        "sync_bn": True,
        "grad_accumulation": 2,
        "precision": "float64",
        "recipe": {**WHOLE, "dtype": "float64"},
    },
    "sparse": {"recipe": TOKENS, "global_batch_size": 6},
    "last batch of one sample": {"recipe": {**WHOLE, "batch_norm": False, "count": 18}},
    "unused": {"recipe": mine("Branching"), "ddp": Ddp(find_unused_parameters=True)},
    "small buckets, viewed": {"ddp": Ddp(bucket_cap_mb=0.0001, gradient_as_bucket_view=True)},
    "hooked on all ranks": {"recipe": mine("Hooked", ranks=[0, 1, 2, 3])},
    "evaluated at random": {"recipe": mine("EvaluatesAtRandom")},
    "noise": {"recipe": mine("Noisy", dtype="float64"), "precision": "float64"},
    "halved by hooks": {"recipe": mine("HalvedByHook")},
    "random forward": {"recipe": mine("StochasticDepth")},
    "optimizer with a rate of its own": {"recipe": mine("OwnRate")},
    "data drawn when it is made": {"recipe": mine("DrawnData")},
    "augmented now and then": {"recipe": mine("DrawnData", augments="common")},
    "augmented by its own generator": {"recipe": mine("DrawnData", augments="own")},
    "augmented by numbers": {"recipe": mine("DrawnData", augments="number")},
    "asks its peers": {"recipe": mine("AsksPeers")},
    "cannot run in float64": {"recipe": mine("NeedsFloat32")},
    "cannot be copied": {"recipe": mine("HoldsALock")},
    "synchronised by the recipe": {"recipe": mine("OwnSyncBatchNorm", layers=2)},
    "synchronised in part": {"recipe": mine("OwnSyncBatchNorm", layers=1)},
}


NOT_PROVEN = {
    "draws in collate()",
    "likes no constants",
    "trains what chance leaves",
    "a centre of its own",
    "remembers what it has seen",
    "cannot run in float64",
    "synchronised in part",
}
"""Correct runs of which the whole batch in one process says nothing."""


# --- in the ranks ----------------------------------------------------------------------------------------------------


def stub(seat, folder, deterministic=True):
    """Return what a verification needs of a rank."""
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    run = RunDir(folder / f"run-{seat.world_size}")
    run.path.mkdir(exist_ok=True)
    return SimpleNamespace(run=run, plan=SimpleNamespace(nprocs=seat.world_size), record=Record())


class Record:
    """Keeps what a rank records."""

    def __init__(self):
        self.logged = []

    def event(self, kind, **body):
        pass

    def log(self, level, text):
        self.logged.append(text)


def taken(plan, seat, folder):
    recipe = make_recipe(plan.recipe)
    trials = Trials(stub(seat, folder, plan.deterministic), recipe, prepare(recipe, seat, seat.rank, plan.seed), seat)
    trial = trials.take(plan)
    said = trials.verdict.sentences() if trials.verdict is not None else []
    proven = trials.verdict is not None and trials.verdict.is_proof
    return None if trial is None else (trial.fired, {**trial.checks, "proven": proven}, said)


def faulty(name, **settings):
    return lambda seat, folder: taken(plan_of(fault=name, compare="full", **NEEDS.get(name, {}), **settings), seat, folder)


def correct(settings):
    return lambda seat, folder: taken(plan_of(compare="full", **settings), seat, folder)


def users(recipe):
    # As many for each rank where the samples are to be the same.
    size = 12 if recipe["count"] == 48 else BATCH
    return lambda seat, folder: taken(plan_of(compare="full", recipe=recipe, global_batch_size=size), seat, folder)


def by_workers(augments):
    def case(seat, folder):
        # A rank of these tests has no folder of its own for the sockets of its workers.
        with used_by_multiprocessing(folder):
            return taken(plan_of(compare="full", recipe=mine("DrawnData", augments=augments), num_workers=1), seat, folder)

    return case


def wavering(by, name="Wavering"):
    return lambda seat, folder: taken(plan_of(compare="full", deterministic=False, recipe=mine(name, by=by)), seat, folder)


def in_pairs(seat, folder):
    models.InPairs.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return taken(plan_of(compare="full", recipe=mine("InPairs")), seat, folder)


def misheard(what):
    def case(seat, folder):
        with exchanging(Mishearing(what)):
            return taken(plan_of(compare="full", sync_bn=True), seat, folder)

    return case


def left_out(seat, folder):
    """Return why each of these faults does not apply to a plain recipe, on this rank."""
    reasons = {}
    plan = plan_of(recipe={"_target_": "tests.toys.Points", "dtype": "float32"}, global_batch_size=12, steps=1)
    for name in ("stale_buffers", "same_dropout_everywhere", "sparse_rows_lost", "scheduler_stepped_by_each_rank"):
        recipe = make_recipe(plan.recipe)
        with pytest.raises(DoesNotApply) as refused:
            inject(Trainer(dataclasses.replace(plan, fault=name), recipe, recipe.dataset(), seat))
        reasons[name] = str(refused.value)
    return reasons


def audited(seat, folder):
    """Return what an audit writes and shows; of two correct runs, to be quick."""
    audits.CORRECT_RUNS = 2
    rank = stub(seat, folder)
    rank.plan.train = plan_of(compare="audit", on_mismatch="stop", recipe={**WHOLE, "dropout": 0.0, "batch_norm": False})
    recipe = make_recipe(rank.plan.train.recipe)
    audits.audit(rank, Trials(rank, recipe, recipe.dataset(), seat), seat)
    return json.loads(rank.run.audit.read_text()), rank.record.logged


def blind(seat, folder):
    """Return what an audit says whose checks are blind to a fault."""
    audits.CORRECT_RUNS, known = 0, audits.FAULTS
    judge, audits.judge = audits.judge, lambda evidence: SimpleNamespace(failed=None, checks=())
    audits.FAULTS = {name: known[name] for name in ("not_sharded", "divided_twice")}
    rank = stub(seat, folder)
    rank.plan.train = plan_of(compare="audit", on_mismatch="stop")
    recipe = make_recipe(rank.plan.train.recipe)
    try:
        with pytest.raises(Mismatch) as refused:
            audits.audit(rank, Trials(rank, recipe, recipe.dataset(), seat), seat)
    finally:
        audits.judge, audits.FAULTS = judge, known
    return str(refused.value)


def on(size, case):
    """Return the case for groups of that size alone."""
    case.sizes = (size,)
    return case


CASES = {
    **{name: faulty(name) for name in FAULTS},
    "one_gradient_scaled in float64": faulty("one_gradient_scaled", precision="float64", recipe={**WHOLE, "dtype": "float64"}),
    "unequal in the last batch alone": on(
        3, faulty("unequal_shards_averaged_equally", recipe={**WHOLE, "count": 52, "dropout": 0.0}, global_batch_size=15)
    ),
    **{f"{name} with sync_bn": faulty(name, sync_bn=True) for name in WITH_SYNC_BN},
    "gather misheard": misheard("gather"),
    "total misheard": misheard("total"),
    **{f"correct: {name}": correct(settings) for name, settings in CORRECT.items()},
    **{f"user: {name}": users(recipe) for name, (recipe, _) in USERS.items()},
    "left out": on(2, left_out),
    "audited": on(2, audited),
    "blind": on(2, blind),
    "wavering": wavering(0.0),
    "wavering, and wrong": wavering(1e-4),
    "wavering, other samples": wavering(0.0, "NoisyWavering"),
    "wavering, and wrong, other samples": wavering(1e-4, "NoisyWavering"),
    "alike, by workers": on(2, by_workers("alike")),
    "by rank, by workers": on(2, by_workers("own")),
    "alike, and not to be copied": on(2, correct({"recipe": mine("DrawnData", augments="alike", locked=True)})),
    "in pairs": on(4, in_pairs),
    "lr off by a chosen size": faulty("lr_times_ranks", fault_size=2e-7),
}


for name, case in CASES.items():
    case.sizes = getattr(case, "sizes", sizes_of(name))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    with groups_of("tests.test_faults", tmp_path_factory.mktemp("faults")) as outcomes:
        yield outcomes


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@at_sizes(FAULTS)
def test_every_fault_is_caught_by_its_check(outcomes, name, size):
    fired, checks, said = outcomes.of(size, name)[0]
    assert fired in FAULTS[name].checks, (checks, said)


@pytest.mark.ranks
@at_sizes(CORRECT, "correct: ")
def test_no_correct_run_is_accused(outcomes, name, size):
    fired, checks, said = outcomes.of(size, f"correct: {name}")[0]
    assert fired is None, said
    assert checks["proven"] == (name not in NOT_PROVEN), checks


@pytest.mark.ranks
def test_buffers_that_one_forward_leaves_the_next_are_followed(outcomes):
    for name, status in {"spectral norm": "passed", "remembers what it has seen": "not checked"}.items():
        _, checks, said = outcomes.of(SIZE, f"correct: {name}")[0]
        assert checks["R7"] == status, said


@pytest.mark.ranks
@at_sizes(USERS, "user: ")
def test_faults_of_a_users_own_code_are_caught(outcomes, name, size):
    fired, checks, said = outcomes.of(size, f"user: {name}")[0]
    assert fired in USERS[name][1], (checks, said)
    if name == "hidden statistics in training":
        assert "rank 1, activation, module linear" in said[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", WITH_SYNC_BN)
def test_faults_are_caught_under_synchronised_batch_norm(outcomes, name):
    fired, checks, said = outcomes.of(SIZE, f"{name} with sync_bn")[0]
    assert fired in FAULTS[name].checks, (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["gather", "total"])
def test_statistics_that_a_rank_hears_wrong_are_caught(outcomes, what):
    fired, checks, said = outcomes.of(SIZE, f"{what} misheard")[0]
    assert fired == "R4" and "statistics, tensor 1" in said[0], (checks, said)


@pytest.mark.ranks
@pytest.mark.parametrize("data", ["", ", other samples"])
def test_kernels_that_waver_are_compared_within_noise(outcomes, data):
    fired, checks, said = outcomes.of(SIZE, f"wavering{data}")[0]
    assert fired is None and checks["R3"] == "passed", (checks, said)
    fired, checks, said = outcomes.of(SIZE, f"wavering, and wrong{data}")[0]
    assert fired == "R3" and "excess ratio" in said[0], (checks, said)


@pytest.mark.ranks
def test_a_fault_of_a_chosen_size_is_caught(outcomes):
    assert outcomes.of(SIZE, "lr off by a chosen size")[0][0] == "R5"


@pytest.mark.ranks
def test_noise_that_ranks_repeat_is_seen_in_workers_and_where_it_cannot_be_the_verdict_says_so(outcomes):
    fired, checks, said = outcomes.of(2, "alike, by workers")[0]
    assert fired == "R11" and "its data set repeats the noise of rank 0's" in said[0], (checks, said)
    for name in ("by rank, by workers", "alike, and not to be copied"):
        fired, checks, said = outcomes.of(2, name)[0]
        assert fired is None, said


@pytest.mark.ranks
def test_layers_synchronised_among_some_ranks_are_not_replayed(outcomes):
    fired, checks, said = outcomes.of(4, "in pairs")[0]
    assert fired is None, said
    assert {checks[name] for name in ("R3", "R7", "R11")} == {"not checked"}


@pytest.mark.ranks
def test_a_fault_too_small_for_bits_is_caught_in_float64(outcomes):
    assert outcomes.of(SIZE, "one_gradient_scaled in float64")[0][0] in ("R4", "R7")


@pytest.mark.ranks
def test_shards_that_are_unequal_in_the_last_batch_alone(outcomes):
    """Batches of 15 divide by 3 ranks; of the last one's 7 samples, rank 0 has one more than the others."""
    assert outcomes.of(3, "unequal in the last batch alone")[0][0] in FAULTS["unequal_shards_averaged_equally"].checks


@pytest.mark.ranks
def test_faults_that_do_not_apply_are_refused_on_all_ranks(outcomes):
    for reasons in outcomes.of(2, "left out"):
        assert (
            reasons["stale_buffers"]
            == "fault=stale_buffers does not apply: the model of Points keeps no statistics of BatchNorm."
        )
        assert "draws no random numbers in forward" in reasons["same_dropout_everywhere"]
        assert "no sparse embeddings" in reasons["sparse_rows_lost"]
        assert "Points has no scheduler" in reasons["scheduler_stepped_by_each_rank"]


@pytest.mark.ranks
def test_an_audit_makes_its_table(outcomes):
    data, logged = outcomes.of(2, "audited")[0]
    rows = {row.fault: row for row in audit_table(trials_of(data))}
    assert rows.keys() | data["left_out"].keys() == {*FAULTS, "none"}
    assert all(row.is_right for row in rows.values())
    assert (rows["none"].red, rows["none"].trials) == (0, 2)
    assert rows["lr_off_on_one_rank"].by_older_rules == {"loss within 1e-3": 0, "loss within 1e-5": 0, "assert_close": 0}
    assert sorted(data["left_out"]) == [
        "accumulation_without_divisor",
        "clipped_before_reduction",
        "same_dropout_everywhere",
        "sparse_rows_lost",
        "stale_buffers",
    ]
    assert logged == ["\n".join(["What the checks catch:", *audit_lines(data)])]


@pytest.mark.ranks
def test_an_audit_of_blind_checks_stops_the_job(outcomes):
    for said in outcomes.of(2, "blind"):
        assert said.startswith("The checks are wrong about this training. ")
        assert "not_sharded: caught 0 of 1" in said


def test_one_rank_asks_nobody():
    plan, cpu = plan_of(recipe=mine("PeersAsked")), torch.device("cpu")
    reasons = [Reference(plan, n, cpu, 8, models.PeersAsked().model()).batch_norms.why_not_alone for n in (1, 2)]
    assert reasons == ["", NEEDS_PEERS]


def test_every_fault_has_an_injection_and_an_option():
    assert INJECTIONS.keys() == FAULTS.keys()
    assert [fault.number for fault in FAULTS.values()] == list(range(1, 37))
    options = {path.removeprefix("fault/"): node for path, node in nodes().items() if path.startswith("fault/")}
    assert options.pop("none") == {"name": None}
    assert options.keys() == FAULTS.keys()
    for name, option in options.items():
        assert option == {"name": name} | ({} if FAULTS[name].size is None else {"size": FAULTS[name].size})


@pytest.mark.parametrize(
    ("settings", "nprocs", "sentence"),
    [
        ({"fault": "not_shardet"}, 2, "fault=not_shardet is unknown; did you mean fault=not_sharded?"),
        ({"fault": "not_sharded"}, 1, "fault=not_sharded is a fault between ranks, and nprocs=1. Use nprocs=2 or more."),
        (
            {"fault": "not_sharded", "fault_size": 3.0},
            2,
            "fault.size=3.0 has no meaning for fault=not_sharded, which has no size. Leave it out.",
        ),
        (
            {"fault": "one_sample_twice", "fault_size": 0.5},
            2,
            "fault.size=0.5 is not a size of fault=one_sample_twice (id an epoch): it is a whole number from 1 on.",
        ),
        (
            {"fault": "lr_off_on_one_rank", "fault_size": 0.0},
            2,
            "fault.size=0.0 is not a size of fault=lr_off_on_one_rank (relative): it is a number above 0.",
        ),
        (
            {"fault": "clipped_before_reduction"},
            2,
            "fault=clipped_before_reduction needs clipping, and clip_norm=null. Use clip_norm=1.0, or what cuts something off.",
        ),
        (
            {"fault": "accumulation_without_divisor"},
            2,
            "fault=accumulation_without_divisor needs accumulation, and grad_accumulation=1. Use grad_accumulation=2 or more.",
        ),
        (
            {"fault": "epoch_not_set", "epochs": 1},
            2,
            "fault=epoch_not_set needs a second epoch, and epochs=1. Use epochs=2 or more.",
        ),
        (
            {"fault": "not_sharded", "compare": "audit"},
            2,
            "compare=audit injects every fault by itself: leave out fault=not_sharded, or use compare=full.",
        ),
    ],
)
def test_the_parent_refuses_what_it_can_know(settings, nprocs, sentence):
    assert plan_of(**settings).problems(nprocs) == [sentence]


def test_a_plan_without_a_fault_is_left_alone():
    recipe = toys.Points(dtype="float32")
    trainer = Trainer(plan_of(), recipe, recipe.dataset(), toys_seat())
    before = dict(vars(trainer))
    assert inject(trainer) is trainer
    assert vars(trainer) == before


def toys_seat():
    from harness.training.seat import Seat

    return Seat(0, 1, torch.device("cpu"))
