"""The optimizer's step, taken again by one process from the run's own state (R5, R14)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.training.digest import Digests, digests, optimizer_digests
from harness.training.state import TrainingState
from harness.verify.reference.process import SingleProcess
from harness.verify.rounding import Gradients


class Update:
    """Takes optimizer steps, with a scheduler of its own that goes on step by step.

    Args:
        process: Whose model is updated.
        world_size: Number of ranks, over which the reduction has taken the mean.
    """

    def __init__(self, process: SingleProcess, world_size: int) -> None:
        self._process = process
        self._world_size = world_size
        self._has_stepped = False
        self._number = 0

    def declared_lr(self) -> list[float]:
        """Return the learning rate that the recipe declares for this step, of each parameter group."""
        return [float(group["lr"]) for group in self._process.optimizer.param_groups]

    def go_on_to(self, number: int) -> None:
        """Let the recipe's own scheduler go on until it is at step ``number``."""
        while self._number < number:
            with self._process.alone():
                self._next_step()
            self._number += 1

    def _next_step(self) -> None:
        process = self._process
        if not self._has_stepped:
            # Schedulers warn of an optimizer that did nothing.
            process.model.zero_grad(set_to_none=True)
            process.optimizer.step()
        self._has_stepped = False
        if process.scheduler is not None:
            process.scheduler.step()

    def step(
        self,
        state: TrainingState,
        rewritten: Mapping[str, Tensor],
        reduced: Gradients,
        items: float | None,
        of_run: Digests,
    ) -> tuple[Digests, list[str]]:
        """Return the state after an optimizer step from ``state`` with ``reduced``, and the names of what moved.

        The step is taken twice: by a new optimizer, put into the run's state, and by one that has taken all steps before, from
        birth on. The second counts where it alone comes to ``of_run``: an optimizer may keep state that ``state_dict()`` lacks.

        Args:
            rewritten: Parameters that forward has changed, which the step finds so.
            items: Number of items in the global batch, where losses are sums over them.
            of_run: The run's state after the step.
        """
        with self._process.alone():
            after, moved = self._stepped(self._new_optimizer(state), state, rewritten, reduced, items)
            in_step, moved_in_step = self._stepped(self._process.optimizer, state, rewritten, reduced, items)
        self._has_stepped = True
        return (in_step, moved_in_step) if after != of_run and in_step == of_run else (after, moved)

    def _stepped(
        self,
        optimizer: Optimizer,
        state: TrainingState,
        rewritten: Mapping[str, Tensor],
        reduced: Gradients,
        items: float | None,
    ) -> tuple[Digests, list[str]]:
        model = self._process.model
        # First the state before the step, then what forward itself has changed of it: so the run's optimizer found it.
        state.restore(model)
        parameters = dict(model.named_parameters())
        for name, value in rewritten.items():
            parameters[name].data.copy_(value)
        for name, gradient in reduced.items():
            # A row that is there twice is added up before it is scaled, as the run declares.
            whole = gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
            parameters[name].grad = None if whole is None else whole.clone()
        self._finish([p for p in parameters.values() if p.grad is not None], items)
        optimizer.step()
        moved = [name for name, p in parameters.items() if not torch.equal(p.detach(), state.model[name])]
        after = {**digests(model.named_parameters()), **optimizer_digests(optimizer.state_dict()["state"])}
        return after, moved

    def _new_optimizer(self, state: TrainingState) -> Optimizer:
        process = self._process
        # A copy, of which nothing passes from one call to the next, as from one trainer to the next.
        optimizer = copy.copy(process.recipe).optimizer(process.model)
        whole = optimizer.state_dict()
        for group, declared in zip(whole["param_groups"], process.optimizer.param_groups, strict=True):
            # The scheduler's changes live in the old optimizer's groups: a new one begins with the first rates.
            group.update({key: value for key, value in declared.items() if key != "params"})
        # A copy, because load_state_dict keeps tensors that need no cast, and the step would change the run's state.
        optimizer.load_state_dict({"state": copy.deepcopy(state.optimizer), "param_groups": whole["param_groups"]})
        return optimizer

    def _finish(self, parameters: list[nn.Parameter], items: float | None) -> None:
        """Scale the gradients by the number of items, where losses are sums, and clip them as the plan says."""
        max_norm = self._process.plan.clip_norm
        for parameter in parameters:
            assert parameter.grad is not None
            if items is not None:
                parameter.grad.mul_(self._world_size / items)
        if max_norm is None:
            return
        dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if len(dense) == len(parameters):
            # torch's own where it can be asked: the run clips by code of ours.
            nn.utils.clip_grad_norm_(dense, max_norm)
        else:
            _clip_sparse(parameters, max_norm)


def _clip_sparse(parameters: list[nn.Parameter], max_norm: float) -> None:
    gradients = [p.grad.coalesce() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    values = [g.values() if g.is_sparse else g for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(value) for value in values]))
    # The 1e-6 is torch's, as in clip_grad_norm_.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.mul_(factor)
