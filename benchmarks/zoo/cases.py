"""What is trained, and whether it is what one process trains: stated before anything is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.run.plan import Ddp, TrainPlan

Truth = Literal["correct", "wrong"]
PLAN: dict[str, Any] = {"global_batch_size": 16, "steps": 3, "compare": "quick"}


@dataclass(frozen=True)
class Case:
    """One recipe with its truth.

    Attributes:
        label: Its name in the table.
        recipe: ``_target_`` and its keys.
        truth: Whether several ranks train what one process trains.
        sort: What is wrong, or what is special.
        nprocs: Number of ranks.
        plan: Settings that are not those of PLAN.
    """

    label: str
    recipe: dict[str, Any]
    truth: Truth
    sort: str = ""
    nprocs: int = 2
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def train(self) -> TrainPlan:
        """The plan of its training."""
        return TrainPlan(recipe=self.recipe, **{**PLAN, **self.plan})

    @property
    def needs_library(self) -> bool:
        """True where the model is not ours to build."""
        return ".pretrained." in self.recipe["_target_"]


def _target(path: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"benchmarks.zoo.{path}", **settings}


def cases() -> list[Case]:
    """Return all cases; their labels are unique."""
    made = [*_pretrained(), *_losses(), *_networks(), *_stateful(), *_settings(), *_optimizers()]
    assert len({case.label for case in made}) == len(made)
    return made


def _pretrained() -> Iterator[Case]:
    mean = "mean of means of tokens"
    for name in ("GPT-2", "Llama", "Qwen2", "GPT-NeoX", "Mamba", "Mixtral", "BERT", "T5", "BART", "Switch"):
        shift = name not in ("BERT", "T5", "BART", "Switch")
        recipe = _target("pretrained.Language", name=name, shift=shift)
        # One of Mamba's, and what no router chose, is not used in every step.
        unused = {"ddp": Ddp(find_unused_parameters=True)} if name in ("Mixtral", "Switch") else {}
        yield Case(f"{name}, tokens summed and counted", recipe, "correct", plan=unused)
        if name in ("GPT-2", "BERT", "T5", "Llama", "Mamba"):
            yield Case(f"{name}, the library's loss", {**recipe, "own_loss": True}, "wrong", mean)
            even = {**recipe, "own_loss": True, "even": True}
            yield Case(f"{name}, the library's loss, sentences of one length", even, "correct")
    language = _target("pretrained.Balanced", name="Mixtral", even=True, initializer_range=0.3)
    moe = {"ddp": Ddp(find_unused_parameters=True)}
    yield Case("Mixtral, balancing loss", language, "wrong", "product of means over the batch", plan=moe)
    switch = {
        **language,
        "name": "Switch",
        "router_aux_loss_coef": 0.02,
        "router_z_loss_coef": 0.0,
        "output_router_logits": True,
    }
    yield Case("Switch, balancing loss", switch, "correct", "product of means over each sentence", plan=moe)
    llama = _target("pretrained.Language", name="Llama", checkpointing=True)
    yield Case("Llama, activations computed again", llama, "correct")
    yield Case("GPT-2, 3 ranks", _target("pretrained.Language", name="GPT-2"), "correct", nprocs=3)
    yield Case(
        "GPT-2, the library's loss, 3 ranks", _target("pretrained.Language", name="GPT-2", own_loss=True), "wrong", mean, 3
    )
    yield Case("GPT-2, bfloat16", _target("pretrained.Language", name="GPT-2"), "correct", plan={"precision": "bfloat16"})
    yield Case("GPT-2, adapters", _target("pretrained.Adapters", name="GPT-2"), "correct", "most is frozen")
    for name in ("ViT", "Swin", "ConvNeXt", "ResNet"):
        yield Case(
            name, _target("pretrained.Vision", name=name), "correct", "BatchNorm of each rank" if name == "ResNet" else ""
        )
    yield Case("ResNet, sync_bn", _target("pretrained.Vision", name="ResNet"), "correct", plan={"sync_bn": True})
    yield Case("ViT, full checks", _target("pretrained.Vision", name="ViT"), "correct", plan={"compare": "full"})
    # The vector that stands for masked sounds, of which there are none.
    unused = {"ddp": Ddp(find_unused_parameters=True)}
    yield Case("wav2vec, sum and count", _target("pretrained.Speech"), "correct", plan=unused)
    yield Case(
        "wav2vec, the library's sum", _target("pretrained.Speech", own_loss=True), "wrong", "a sum, not a mean", plan=unused
    )
    speech = _target("pretrained.Speech", own_loss=True, reduction="mean")
    yield Case("wav2vec, the library's mean", speech, "correct", "each sample by its own length", plan=unused)
    yield Case("CLIP", _target("pretrained.Contrastive"), "wrong", "negatives of the rank alone")


_WRONG_LOSSES = {
    "weighted mean": "mean of weighted means",
    "focal by positives": "divided by the rank's count",
    "sum": "a sum, not a mean",
    "times ranks": "asks for the number of ranks",
    "root of the mean square": "a root of a mean",
    "hardest half": "chosen among the rank's samples",
    "median": "chosen among the rank's samples",
    "triplet of the hardest": "chosen among the rank's samples",
    "contrastive in the batch": "negatives of the rank alone",
    "decorrelated": "statistics of the rank's samples",
    "entropy of the mean": "statistics of the rank's samples",
    "dice of the batch": "a quotient of sums",
    "balanced by the batch": "weights from the rank's counts",
    "one kind, mean": "mean of means of a part",
    "normalised advantage": "statistics of the rank's samples",
}
_CORRECT_LOSSES = (
    "label smoothing",
    "weighted sum and weights",
    "focal",
    "mixup",
    "dice of each sample",
    "one kind, sum and count",
    "gradient penalty",
    "sampled negatives",
    "mean square of float32 constants",
)


def _losses() -> Iterator[Case]:
    for name in _CORRECT_LOSSES:
        yield Case(f"loss: {name}", _target("losses.Classifier", loss=name), "correct")
    for name, sort in _WRONG_LOSSES.items():
        yield Case(f"loss: {name}", _target("losses.Classifier", loss=name), "wrong", sort)
    yield Case("loss: weighted mean, 3 ranks", _target("losses.Classifier", loss="weighted mean"), "wrong", "mean of means", 3)
    dropped = _target("losses.Classifier", loss="weighted mean", network="dropout")
    yield Case("loss: weighted mean, with dropout", dropped, "wrong", "mean of weighted means")
    again = _target("losses.Classifier", loss="weighted mean", network="checkpointed")
    yield Case("loss: weighted mean, activations computed again", again, "wrong", "mean of weighted means")
    normed = _target("losses.Classifier", loss="weighted mean", network="batch norm")
    yield Case("loss: weighted mean, with BatchNorm", normed, "wrong", "mean of weighted means")
    sparse = _target("losses.Classifier", loss="weighted mean", network="sparse table")
    yield Case("loss: weighted mean, with a sparse table", sparse, "wrong", "mean of weighted means")
    for precision in ("bfloat16", "float64"):
        plan = {"precision": precision}
        recipe = _target("losses.Classifier", loss="weighted mean")
        yield Case(f"loss: weighted mean, {precision}", recipe, "wrong", "mean of weighted means", plan=plan)


_WRONG_NETWORKS = {
    "codes by samples": "a buffer of the rank's samples",
    "running mean of samples": "a buffer of the rank's samples",
    "divided by batch size": "asks for the batch's size",
    "attention over the batch": "samples see each other",
}


def _networks() -> Iterator[Case]:
    from benchmarks.zoo.networks import NETWORKS

    for name in NETWORKS:
        truth: Truth = "wrong" if name in _WRONG_NETWORKS else "correct"
        yield Case(f"network: {name}", _target("losses.Classifier", network=name), truth, _WRONG_NETWORKS.get(name, ""))
    norm = _target("losses.Classifier", network="batch norm")
    yield Case("network: batch norm, sync_bn", norm, "correct", nprocs=3, plan={"sync_bn": True})
    yield Case("network: dropout, 3 ranks", _target("losses.Classifier", network="dropout"), "correct", nprocs=3)


def _stateful() -> Iterator[Case]:
    yield Case("noise of each sample's number", _target("stateful.Augmented", source="number"), "correct")
    yield Case("noise of torch's generator", _target("stateful.Augmented", source="common"), "correct")
    noise = "all ranks draw the same noise"
    yield Case("noise of a generator seeded alike", _target("stateful.Augmented", source="own"), "wrong", noise)
    yield Case("loss by its running mean", _target("stateful.Scaled"), "wrong", "an attribute of the rank's samples")
    yield Case("loss that counts its calls", _target("stateful.Counted"), "correct")
    yield Case("data split by the recipe too", _target("stateful.OwnShard"), "wrong", "asks for the number of ranks")
    yield Case("sum over a constant batch size", _target("stateful.ScaledBatch"), "wrong", "right for one number of ranks")
    yield Case("regulariser of rank 0 alone", _target("stateful.FirstRank"), "wrong", "asks for the rank")
    yield Case("distillation", _target("stateful.Distilled"), "correct")


def _settings() -> Iterator[Case]:
    recipe, gpt2 = _target("losses.Classifier"), _target("pretrained.Language", name="GPT-2")
    yield Case("accumulation of 2", gpt2, "correct", plan={"grad_accumulation": 2})
    mean = _target("pretrained.Language", name="GPT-2", own_loss=True)
    yield Case("accumulation of 2, the library's loss", mean, "wrong", "mean of means of tokens", plan={"grad_accumulation": 2})
    yield Case("clipping", gpt2, "correct", plan={"clip_norm": 0.1})
    yield Case("shards of unequal size", recipe, "correct", nprocs=3, plan={"global_batch_size": 17})
    yield Case("full checks", recipe, "correct", plan={"compare": "full"})


_WRONG_OPTIMIZERS = {
    "Langevin": "each rank draws for itself",
    "lr times ranks, read at import": "asks for the number of ranks",
    "lr times ranks, read when made": "asks for the number of ranks",
}


def _optimizers() -> Iterator[Case]:
    from benchmarks.zoo.optimizers import OPTIMIZERS

    for name in OPTIMIZERS:
        truth: Truth = "wrong" if name in _WRONG_OPTIMIZERS else "correct"
        yield Case(f"optimizer: {name}", _target("losses.Classifier", optimizer=name), truth, _WRONG_OPTIMIZERS.get(name, ""))
    vit = _target("pretrained.Vision", name="ViT")
    for name in ("AdamW", "Adafactor", "Lion"):
        yield Case(f"ViT, {name}", {**vit, "optimizer": name}, "correct")
