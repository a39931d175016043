"""The reference: one process that replays the shards of N ranks.

What it checks, it does by means of its own: the weights of unequal shards, the sum over pieces, the mean over ranks (in
float64, from what the ranks themselves captured), clipping (torch's own), the declared learning rate (a scheduler of its own),
the optimizer's step (a new optimizer with the recipe's own settings), evaluation, and the samples of a batch, loaded again from
a data set of its own. It shares with the run: the recipe, and how it and its scheduler are made (``training.recipe``); torch's
kernels, thread count and determinism flags; the seed's derivation; ``training.digest``; copies of state (``training.state``);
synchronised layers and what they exchange (``training.parallel.batchnorm``), which R7 holds against plain BatchNorm over the
whole batch; how a recipe groups samples into batches (``training.loader``, where R1 counts the samples); and, where BatchNorm
takes its statistics over shards, which samples these are (``training.shard``, whose parts R1 checks). Where the whole batch is
compared, both sides hold constant what is drawn (``verify.constant_draws``), and a data set that draws is read once, by rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import default_collate

from harness.errors import ConfigError, HarnessError
from harness.run.plan import TrainPlan
from harness.training.digest import Digests, digests, optimizer_digests, state_digests, value_digest
from harness.training.loader import epoch_batches, holding
from harness.training.parallel.batchnorm import SyncBatchNorm, group_of, synchronised, with_fixed_statistics
from harness.training.parallel.batchnorm_messages import Exchanged, OneProcess, Replaying, exchanging
from harness.training.parallel.collectives import world_size
from harness.training.recipe import Recipe, learning_rates, make_recipe, make_scheduler
from harness.training.seeds import EVALUATION_SEED, derive, seed_everything
from harness.training.state import TrainingState, copied, in_precision, named_tensors, random_states, set_random_states, widened
from harness.verify.activations import activations
from harness.verify.constant_draws import ConstantDraws, UnknownDraw
from harness.verify.narrowing import Narrowing
from harness.verify.one_process import WorldOfOne, unanswered
from harness.verify.rounding import Gradients

ASKS_OTHERS = "loss() or the model asks the other ranks by torch.distributed, which one process cannot answer"
HOLDS_A_GROUP = "the recipe or its model holds a process group, of which one process is not a part as the ranks are"
NEEDS_PEERS = "torch.nn.SyncBatchNorm asks the other ranks (sync_bn=true puts in its place what can be replayed)"
IN_SUBGROUPS = "a BatchNorm layer is synchronised among some of the ranks, and one process has no such group"


class Unrepeatable(HarnessError):
    """What the ranks do cannot be done again by one process; the text says why."""


@dataclass(frozen=True)
class Replayed:
    """What one shard came to in the reference.

    Attributes:
        losses: Of each piece, before weighting.
        counts: Samples or items of each piece.
        gradients: Weighted as the run's are.
        buffers: After the pieces.
        batch: Digest of the samples that it loaded.
        drew_random: True where forward drew random numbers.
        exchanged: What its synchronised layers told, and what the rank itself had heard.
        activations: Module -> digest of what it returned, in that order; of a full verification.
        rewritten: Parameters that forward itself has changed (a mean of others, a bound), as it left them.
    """

    losses: list[float]
    counts: list[float]
    gradients: Gradients
    buffers: Digests
    batch: str
    drew_random: bool
    exchanged: list[Exchanged]
    activations: Digests
    rewritten: Mapping[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a global batch, and what else went into its step.

    Attributes:
        pieces: Sample numbers, a list for each backward.
        global_size: Samples in the global batch.
        random: The rank's generators before it loaded its samples.
        loaded: The batches as the rank loaded them, where they cannot be loaded again; None to load them.
        exchanged: What synchronised layers of the rank told and heard.
    """

    pieces: Sequence[Sequence[int]]
    global_size: int
    random: Mapping[str, Any]
    loaded: Sequence[Any] | None
    exchanged: Sequence[Exchanged] = ()


class Reference:
    """A training of the same recipe in this process alone, put into the run's own state before each step it replays.

    Its recipe hears that it is one process of one, but while it replays a rank's shard, which is what a rank does.

    Args:
        plan: Of the run.
        world_size: Whose shards are replayed.
        device: Of this process.
        num_steps: Of the whole run, for the scheduler.
        ranks_model: Of a rank: it tells which BatchNorm layers are synchronised.
    """

    def __init__(self, plan: TrainPlan, world_size: int, device: torch.device, num_steps: int, ranks_model: nn.Module) -> None:
        self._plan = plan
        self._world_size = world_size
        self._device = device
        self._norms = {name: layer for name, layer in ranks_model.named_modules() if isinstance(layer, _BatchNorm)}
        self._one_process = WorldOfOne()
        self._refused = False
        with self._one_process.entered():
            self._make(num_steps)
        self._be_a_rank()

    def _make(self, num_steps: int) -> None:
        plan = self._plan
        self.num_steps = num_steps
        self.recipe: Recipe = make_recipe(plan.recipe)
        made = dict(vars(self.recipe))
        seed_everything(derive(plan.seed, "dataset"))
        self.dataset: Any = self.recipe.dataset()
        self.model = self._born(torch.float64 if plan.precision == "float64" else torch.float32)
        self.given: Mapping[int, Any] | None = None
        self.narrowed: torch.dtype | None = None
        self.drew_in_evaluation = False
        self._repeats: bool | None = None
        self._looks = 0
        self._draws = False
        self._declared = self.recipe.optimizer(self.model)
        self.birth = self._birth()
        self._has_stepped = False
        self._scheduler = make_scheduler(self.recipe, self._declared, num_steps)
        # What a recipe learns of its data and model, it may use in its loss.
        self._learnt = {name: value for name, value in vars(self.recipe).items() if made.get(name, self) is not value}

    def _be_a_rank(self) -> None:
        """Make the recipe that replays a rank's shards: it hears what a rank hears."""
        self._ranks_recipe, self._why_no_rank = self.recipe, ""
        try:
            with self._as_rank():
                self._ranks_recipe = make_recipe(self._plan.recipe)
        except Unrepeatable as error:
            self._why_no_rank = str(error)
        vars(self._ranks_recipe).update(self._learnt)

    def _born(self, dtype: torch.dtype) -> nn.Module:
        seed_everything(derive(self._plan.seed, "model"))
        return in_precision(self.recipe.model(), self._device, dtype)

    @cached_property
    def _wide(self) -> nn.Module:
        """The model in float64: made anew, because a copy would lack the hooks on its tensors, and not every model has one.

        Raises:
            ConfigError: The recipe returned the model that it had returned before.
        """
        with self._one_process.entered():
            made = self._born(torch.float64)
        if made is self.model:
            raise ConfigError(f"{type(self.recipe).__name__}.model() returned one module twice: make a new one each time.")
        # optimizer() may have frozen some.
        trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(trained[name])
        return made

    @cached_property
    def _wide_recipe(self) -> Recipe:
        wide: Recipe = widened(self.recipe)
        return wide

    def _birth(self) -> Digests:
        return {**state_digests(self.model, self._declared), **digests(self.model.named_buffers())}

    @property
    def batch_norms(self) -> list[nn.Module]:
        """The BatchNorm layers of a rank's model."""
        return list(self._norms.values())

    @property
    def has_local_statistics(self) -> bool:
        """Whether BatchNorm layers normalise each rank's batch by itself."""
        return any(not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) for layer in self.batch_norms)

    @property
    def why_not_alone(self) -> str:
        """Why one process cannot replay a rank, whose model asks other ranks; empty where it can."""
        if self._world_size == 1:
            return ""
        if any(isinstance(layer, nn.SyncBatchNorm) for layer in self.batch_norms):
            return NEEDS_PEERS
        groups = [group_of(layer) for layer in self.batch_norms]
        return IN_SUBGROUPS if any(world_size(group) != self._world_size for group in groups if group is not None) else ""

    @property
    def why_not_replayed(self) -> str:
        """Why one process cannot do what a rank does; empty where it can."""
        holders = [self._ranks_recipe, *(module for module in self.model.modules() if not isinstance(module, _BatchNorm))]
        held = any(isinstance(value, ProcessGroup | DeviceMesh) for holder in holders for value in vars(holder).values())
        return HOLDS_A_GROUP if held and self._world_size > 1 else self._why_no_rank or self.why_not_alone

    @property
    def why_not_whole(self) -> str:
        """Why the whole batch in this one process is not what the ranks do together; empty where it is."""
        if any("BatchNorm" in getattr(layer, "original_name", "") for layer in self.model.modules()):
            return "BatchNorm in a scripted module cannot be held to its running statistics"
        own = {isinstance(layer, SyncBatchNorm) for layer in self.batch_norms}
        if len(own) == 2:
            return "some BatchNorm layers are synchronised and others are not, which one process cannot do"
        return self.why_not_alone

    # --- one shard ---------------------------------------------------------------------------------------------------

    def replay(self, state: TrainingState, part: Shard) -> Replayed:
        """Return losses and gradients of one shard; buffers of ``state`` are rank 0's, from which each forward starts."""
        told = Replaying(part.exchanged, self._world_size)
        synchronised_layers = [name for name, layer in self._norms.items() if isinstance(layer, SyncBatchNorm)]
        with self._as_rank(), exchanging(told), synchronised(self.model, synchronised_layers):
            replayed = self._replay(state, part, told)
        if self._refused:
            raise Unrepeatable(ASKS_OTHERS)  # and the recipe has passed over it
        return replayed

    def _replay(self, state: TrainingState, part: Shard, told: Replaying) -> Replayed:
        batches = self._begin(self.model, state, part)
        batch, before = value_digest(batches), value_digest(random_states())
        with activations(self.model, self._plan) as found:
            losses, counts = self._backward(self.model, part, batches)
        return Replayed(
            losses,
            counts,
            _gradients(self.model),
            digests(self.model.named_buffers()),
            batch,
            before != value_digest(random_states()),
            told.record,
            found,
            {name: p.detach().clone() for name, p in self.model.named_parameters() if not torch.equal(p, state.model[name])},
        )

    def exact_shard(self, state: TrainingState, part: Shard) -> Gradients:
        """Return the gradients of one shard in float64, of a model that draws no random numbers."""
        batches = self._begin(self._wide, state, part)
        self._backward(self._wide, part, batches, torch.float64)
        return _gradients(self._wide)

    def _begin(self, model: nn.Module, state: TrainingState, part: Shard) -> list[Any]:
        """Put the model and all generators where the rank's were, and return its batches."""
        _restore(model, state)
        set_random_states(part.random)
        # A loss may work in place.
        return [self._load(piece) for piece in part.pieces] if part.loaded is None else copied([*part.loaded])

    def _backward(
        self, model: nn.Module, part: Shard, batches: Sequence[Any], dtype: torch.dtype | None = None
    ) -> tuple[list[float], list[float]]:
        """Leave the shard's gradients in the model; return losses and counts of its pieces."""
        losses, counts = [], []
        for piece, batch in zip(part.pieces, batches, strict=True):
            loss, items = self._loss(self._ranks_recipe, model, batch, dtype)
            (loss * self._weight(piece, items, part.global_size)).backward()
            losses.append(float(loss.detach()))
            counts.append(float(items) if items is not None else float(len(piece)))
        return losses, counts

    def _weight(self, piece: Sequence[int], items: Tensor | None, global_size: int) -> float:
        return 1.0 if items is not None else len(piece) * self._world_size / global_size

    def _load(self, ids: Sequence[int]) -> Any:
        collate = getattr(self.recipe, "collate", None) or default_collate
        if self.given is not None:
            return collate(copied([self.given[number] for number in ids]))
        return collate(_samples(self.dataset, ids))

    @property
    def draws_samples(self) -> bool:
        """Whether the data set draws random numbers, so that another reading comes to other samples."""
        return self._draws or self._repeats is False

    def joins_alike(self, ids: Sequence[int]) -> bool:
        """Return True where the same samples are joined to the same batch again."""
        return value_digest(self._load(ids)) == value_digest(self._load(ids))

    def can_load(self, part: Shard) -> bool:
        """Return True where the samples of a shard can be loaded again: by the same generators they are the same bits.

        Found out by loading a first shard of each rank twice. Where it draws random numbers, workers have generators of their
        own.
        """
        if self._repeats is not False and self._looks < self._world_size:
            self._looks += 1
            read = []
            for _ in range(2):
                set_random_states(part.random)
                read.append(value_digest([self._load(piece) for piece in part.pieces]))
            self._draws |= value_digest(random_states()) != value_digest(dict(part.random))
            self._repeats = read[0] == read[1]
        return self._repeats is True and not (self._draws and self._plan.num_workers)

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Be one of the ranks, without the others.

        Raises:
            Unrepeatable: The recipe asks them.
        """

        def refuse(*_: Any, **__: Any) -> None:
            self._refused = True
            raise Unrepeatable(ASKS_OTHERS)

        with unanswered(self._world_size, refuse) if self._world_size > 1 else nullcontext():
            yield

    def _loss(
        self, recipe: Recipe, model: nn.Module, batch: Any, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        wide = dtype == torch.float64 or (dtype is None and self._plan.precision == "float64")
        narrow = self._plan.precision == "bfloat16" and dtype is None
        batch = _moved(batch, self._device, wide)
        with torch.autocast(self._device.type, torch.bfloat16) if narrow else nullcontext():
            loss = recipe.loss(model, batch)
        return loss if isinstance(loss, tuple) else (loss, None)

    # --- what one process has ------------------------------------------------------------------------------------------

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        return len(self.dataset)

    def batches(self, epoch: int) -> list[list[int]]:
        """Return the global batches of an epoch."""
        plan = self._plan
        with self._one_process.entered():
            found = epoch_batches(self.recipe, self.num_samples, plan.global_batch_size, plan.seed, epoch)
        return [list(batch) for batch in found]

    def num_evaluated(self) -> int:
        """Return how many samples there are to evaluate on."""
        with self._one_process.entered():
            seed_everything(derive(EVALUATION_SEED, "eval_dataset"))
            return len(self.recipe.eval_dataset())  # type: ignore[attr-defined]

    def learning_rates(self, number: int) -> list[list[float]]:
        """Return the learning rates, of each parameter group, that the recipe declares for the first steps."""
        with self._one_process.entered():
            return learning_rates(copy.copy(self.recipe), self.model, self.num_steps, number)

    # --- the update --------------------------------------------------------------------------------------------------

    def declared_lr(self) -> list[float]:
        """Return the learning rate that the recipe declares for this step, of each parameter group."""
        return [float(group["lr"]) for group in self._declared.param_groups]

    def next_step(self) -> None:
        """Let the recipe's own scheduler go on."""
        with self._one_process.entered():
            if not self._has_stepped:
                # Schedulers warn of an optimizer that did nothing.
                self.model.zero_grad(set_to_none=True)
                self._declared.step()
            self._has_stepped = False
            if self._scheduler is not None:
                self._scheduler.step()

    def update(
        self,
        state: TrainingState,
        rewritten: Mapping[str, Tensor],
        reduced: Gradients,
        items: float | None,
        found: Digests,
    ) -> tuple[Digests, list[str]]:
        """Return the state after an optimizer step from ``state`` with ``reduced``, and the names of what moved.

        The step is taken twice: by a new optimizer, put into the run's state, and by one that has taken all steps before, from
        birth on. The second counts where it alone comes to ``found``: an optimizer may keep state that ``state_dict()`` lacks.

        Args:
            rewritten: Parameters that forward has changed, which the step finds so.
            items: Number of items in the global batch, where losses are sums over them.
            found: The run's state after the step.
        """
        with self._one_process.entered():
            after, moved = self._stepped(self._optimizer(state), state, rewritten, reduced, items)
            in_step, moved_in_step = self._stepped(self._declared, state, rewritten, reduced, items)
        self._has_stepped = True
        return (in_step, moved_in_step) if after != found and in_step == found else (after, moved)

    def _stepped(
        self,
        optimizer: Optimizer,
        state: TrainingState,
        rewritten: Mapping[str, Tensor],
        reduced: Gradients,
        items: float | None,
    ) -> tuple[Digests, list[str]]:
        state.restore(self.model)
        parameters = dict(self.model.named_parameters())
        for name, value in rewritten.items():
            parameters[name].data.copy_(value)
        for name, gradient in reduced.items():
            # A row that is there twice is added up before it is scaled, as the run declares.
            whole = gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
            parameters[name].grad = None if whole is None else whole.clone()
        self._finish([p for p in parameters.values() if p.grad is not None], items)
        optimizer.step()
        moved = [name for name, p in parameters.items() if not torch.equal(p.detach(), state.model[name])]
        after = {**digests(self.model.named_parameters()), **optimizer_digests(optimizer.state_dict()["state"])}
        return after, moved

    def _optimizer(self, state: TrainingState) -> Optimizer:
        # A copy, of which nothing passes from one call to the next, as from one trainer to the next.
        optimizer = copy.copy(self.recipe).optimizer(self.model)
        whole = optimizer.state_dict()
        for group, declared in zip(whole["param_groups"], self._declared.param_groups, strict=True):
            group.update({key: value for key, value in declared.items() if key != "params"})
        optimizer.load_state_dict({"state": copy.deepcopy(state.optimizer), "param_groups": whole["param_groups"]})
        return optimizer

    def _finish(self, parameters: list[nn.Parameter], items: float | None) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            if items is not None:
                parameter.grad.mul_(self._world_size / items)
        if self._plan.clip_norm is None:
            return
        dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if len(dense) == len(parameters):
            nn.utils.clip_grad_norm_(dense, self._plan.clip_norm)
        else:
            _clip_sparse(parameters, self._plan.clip_norm)

    # --- mathematics -------------------------------------------------------------------------------------------------

    def whole_batch(
        self, state: TrainingState, shards: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype | None
    ) -> tuple[float, Gradients]:
        """Return loss and gradient of the global batch in this one process, with nothing dropped or drawn.

        The batch goes through at once. BatchNorm of each rank's own batch takes its running statistics meanwhile, as the ranks
        do in this comparison: how they treat their own batches, the replay shows. Synchronised, it goes through piece by piece,
        of all ranks together. So it does where each forward leaves buffers for the next one, as ``spectral_norm`` does.

        Args:
            shards: Sample numbers of each rank, in rank order, a list for each piece.
            dtype: float64, or None for the run's own precision.

        Raises:
            Unrepeatable: Forward draws other random numbers than torch's, cannot run in float64, or leaves for the next piece
                what depends on the samples.
        """
        with self._one_process.entered(), ConstantDraws(), exchanging(OneProcess()):
            try:
                return self._whole_batch(state, shards, dtype)
            except Unrepeatable:
                raise
            except UnknownDraw as error:
                raise Unrepeatable(f"forward draws random numbers in a way that cannot be held constant ({error})") from error
            except Exception as error:
                if dtype is None or self._plan.precision == "float64":
                    raise
                said = (str(error).splitlines() or [type(error).__name__])[0]
                raise Unrepeatable(f"the recipe cannot run in float64 ({said})") from error

    def losses_in_other_orders(
        self, state: TrainingState, shards: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype | None
    ) -> list[float]:
        """Return the loss of the global batch with its samples in other orders: only rounding tells them apart."""
        model = self.model if dtype is None else self._wide
        model.train()
        with self._one_process.entered(), ConstantDraws(), exchanging(OneProcess()), self._fixed_statistics(model):
            parts = self._parts(model, state, shards, dtype)
            found = []
            for reorder in _ORDERS:
                with torch.no_grad():
                    loss, number = self._forward(model, state, [reorder(part) for part in parts], dtype)
                found.append(float(loss) / number)
        return found

    def _fixed_statistics(self, model: nn.Module) -> AbstractContextManager[None]:
        return with_fixed_statistics(model) if self.has_local_statistics else nullcontext()

    def _whole_batch(
        self, state: TrainingState, shards: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype | None
    ) -> tuple[float, Gradients]:
        model = self.model if dtype is None else self._wide
        self.narrowed = None
        model.train()
        # Around backward too, which calls forward again where activations are not kept.
        with self._fixed_statistics(model):
            parts = self._parts(model, state, shards, dtype)
            model.zero_grad(set_to_none=True)
            loss, number = self._forward(model, state, parts, dtype)
            mean = loss / number
            mean.backward()
        return float(mean.detach()), _gradients(model)

    def _forward(
        self, model: nn.Module, state: TrainingState, parts: Sequence[Sequence[int]], dtype: torch.dtype | None
    ) -> tuple[Tensor, float]:
        """Return the sum of losses over parts that go through one after the other, from ``state``, and their number."""
        state.restore(model)
        total, weight, narrowing = torch.zeros((), dtype=torch.float64, device=self._device), 0.0, Narrowing()
        for part in parts:
            before = value_digest(random_states())
            batch = self._load(part)
            with narrowing:
                loss, items = self._loss(self.recipe if dtype is None else self._wide_recipe, model, batch, dtype)
            self.narrowed = narrowing.narrowed(loss) or self.narrowed
            if value_digest(random_states()) != before:
                raise Unrepeatable("forward or collate() draws random numbers, and not by torch, whose draws are held constant")
            number = float(items) if items is not None else float(len(part))
            total = total + (loss if items is not None else loss * number).double()
            weight += number
        return total, weight

    def _parts(
        self, model: nn.Module, state: TrainingState, shards: Sequence[Sequence[Sequence[int]]], dtype: torch.dtype | None
    ) -> list[list[int]]:
        """Return the batch in parts that go through one after the other."""
        together = [[number for piece in pieces for number in piece] for pieces in zip_longest(*shards, fillvalue=())]
        synchronised = self.batch_norms and not self.has_local_statistics
        if synchronised or (len(together) > 1 and self._leaves_state(model, state, shards, together[0], dtype)):
            return together
        return [[number for rank in shards for piece in rank for number in piece]]

    def _leaves_state(
        self,
        model: nn.Module,
        state: TrainingState,
        shards: Sequence[Sequence[Sequence[int]]],
        together: Sequence[int],
        dtype: torch.dtype | None,
    ) -> bool:
        """Return whether a forward changes buffers or parameters, which the next piece then finds.

        Raises:
            Unrepeatable: That depends on the samples: each rank has state of its own then, and the whole batch has another.
        """
        whole = self._left(model, state, together, dtype)
        changed = [name for name, tensor in whole.items() if not _same(tensor, state.model.get(name))]
        for part in [rank[0] for rank in shards if rank and changed]:
            mine = self._left(model, state, part, dtype)
            wrong = next((name for name in changed if not _same(whole[name], mine.get(name))), None)
            if wrong is not None:
                said = f"forward leaves in '{wrong}' what depends on its samples, and the next piece starts from it"
                raise Unrepeatable(said)
        return bool(changed)

    def _left(
        self, model: nn.Module, state: TrainingState, part: Sequence[int], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Return parameters and buffers after one forward from ``state``."""
        with torch.no_grad():
            self._forward(model, state, [part], dtype)
        return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, state: TrainingState, parts: Sequence[Sequence[int]], size: int, draw: int) -> dict[str, list[float]]:
        """Return name -> [sum, count] over the samples of ``parts``, in batches of at most ``size``.

        ``draw`` numbers the random streams that evaluation may draw from: what depends on it cannot be compared.
        """
        with self._one_process.entered():
            return self._evaluate(state, parts, size, draw)

    def _evaluate(self, state: TrainingState, parts: Sequence[Sequence[int]], size: int, draw: int) -> dict[str, list[float]]:
        seed_everything(derive(EVALUATION_SEED, "eval_dataset"))
        dataset = self.recipe.eval_dataset()  # type: ignore[attr-defined]
        seed_everything(derive(EVALUATION_SEED, "draw", draw))
        collate = getattr(self.recipe, "collate", None) or default_collate
        state.restore(self.model)
        self.model.eval()
        totals: dict[str, list[float]] = {}
        before = value_digest(random_states())
        with torch.no_grad():
            for part in parts:
                for start in range(0, len(part), size):
                    samples = collate(_samples(dataset, part[start : start + size]))
                    batch = _moved(samples, self._device, self._plan.precision == "float64")
                    for name, (value, count) in self.recipe.evaluate(self.model, batch).items():  # type: ignore[attr-defined]
                        pair = totals.setdefault(name, [0.0, 0.0])
                        pair[0] += float(value)
                        pair[1] += float(count)
        self.drew_in_evaluation = value_digest(random_states()) != before
        return totals


_ORDERS: tuple[Callable[[Sequence[int]], list[int]], ...] = (
    lambda part: [*part][::-1],
    lambda part: [*part[len(part) // 2 :], *part[: len(part) // 2]],
    lambda part: [*part[::2], *part[1::2]],
)


def _samples(dataset: Any, ids: Sequence[int]) -> list[Any]:
    """Return the samples of these numbers, as torch's loader fetches them."""
    fetch = getattr(dataset, "__getitems__", None)
    return list(fetch(list(ids))) if fetch is not None else [dataset[number] for number in ids]


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(one, other.to(one))


def _restore(model: nn.Module, state: TrainingState) -> None:
    state.restore(model)
    model.train()
    model.zero_grad(set_to_none=True)


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def _moved(batch: Any, device: torch.device, wide: bool) -> Any:
    if isinstance(batch, Tensor):
        is_narrow = batch.is_floating_point() or batch.is_complex()
        to = torch.complex128 if batch.is_complex() else torch.float64
        return batch.to(device, to if wide and is_narrow else batch.dtype)
    if isinstance(batch, Mapping):
        return holding(batch, {key: _moved(value, device, wide) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        moved = [_moved(value, device, wide) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def _clip_sparse(parameters: list[nn.Parameter], max_norm: float) -> None:
    gradients = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    values = [g.values() if g.is_sparse else g for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in values]))
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.mul_(factor)
