"""Sparse embeddings over ranks: gradients are averaged row by row, where DDP fails on a table that a step left untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.variable import Variable
from torch.distributed import ProcessGroup

from harness.errors import HarnessError
from harness.training.batch import tensors_in
from harness.training.parallel.collectives import all_gather, world_size


def _sparse_modules(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the layers whose weight gets a sparse gradient."""
    return [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]


def sparse_tables(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights of sparse layers, each once, in the order of the module."""
    weights = {id(layer.weight): layer.weight for layer in _sparse_modules(module)}
    # Of a parametrised layer the weight is computed, and no parameter.
    return [p for p in weights.values() if isinstance(p, nn.Parameter) and p.requires_grad]


# In this order: the largest kind on any rank says how all of them reduce.
_NO_GRAD, _SPARSE, _DENSE = range(3)


Rows = Callable[[list[nn.Parameter]], None]
"""Changes the local gradients of tables before they are reduced."""


class SparseTables:
    """The sparse tables of one module; averages their gradients over the ranks at the end of each backward.

    Args:
        module: The module that holds the tables.
        tables: Parameters to reduce, equal on all ranks.
        anchor: A parameter of DDP's, or None. A rank whose step touches tables only would never wake DDP's reducer, and
            the others would wait for it: so each use of a table leads backward to the anchor too, without a gradient.
        group: The process group.
    """

    def __init__(
        self, module: nn.Module, tables: list[nn.Parameter], anchor: nn.Parameter | None, group: ProcessGroup | None
    ) -> None:
        self._module = module
        self._tables = tables
        self._anchor = anchor
        self._group = group
        self._queued = False
        self.before_reduction: Rows | None = None

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Tie the outputs of all sparse layers to the anchor; for one forward, so that no copy carries the hooks."""
        anchor = self._anchor
        if anchor is None:
            yield
            return

        def tie(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            return _tie(output, anchor) if output.requires_grad else output

        handles = [layer.register_forward_hook(tie) for layer in _sparse_modules(self._module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reduce_after_backward(self, output: Any) -> None:
        """Have every backward from ``output`` end with the reduction.

        Raises:
            HarnessError: If there is no tensor in the output.
        """
        tensors = list(tensors_in(output))
        if not tensors:
            raise HarnessError(
                f"The module has sparse embeddings and returns {type(output).__name__}, in which no tensor was found: "
                "the end of backward would go unnoticed. Return a tensor, or a list, tuple, dict or dataclass of them."
            )
        self._queued = False  # a backward that raised has left it set
        for tensor in tensors:
            if tensor.requires_grad:
                # The output's hook runs as backward begins; what it queues runs when backward is over.
                tensor.register_hook(self._queue)

    def _queue(self, _grad: Tensor) -> None:
        # torch has no public call for this; DDP and FSDP end their backward in the same way.
        if not self._queued:
            # Several outputs may have the hook, and one reduction is enough.
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued = False
        if self.before_reduction is not None:
            self.before_reduction(self._tables)
        # Kinds first: a table may be untouched on one rank only, and all have to come to the same collectives.
        kinds_and_rows = torch.tensor([self._describe(table) for table in self._tables], device=self._tables[0].device)
        by_table = torch.stack(all_gather(kinds_and_rows, self._group), dim=1).tolist()
        for table, per_rank in zip(self._tables, by_table, strict=True):
            kind = max(kind for kind, _ in per_rank)
            if kind == _DENSE:
                table.grad = _dense_mean(table, self._group)
            elif kind == _SPARSE:
                table.grad = _sparse_mean(table, [rows for _, rows in per_rank], self._group)

    @staticmethod
    def _describe(table: nn.Parameter) -> tuple[int, int]:
        """Return the kind of gradient and the number of its rows; coalesces it, so that each row travels once."""
        if table.grad is None:
            return _NO_GRAD, 0
        if not table.grad.is_sparse:
            return _DENSE, 0
        table.grad = table.grad.coalesce()
        return _SPARSE, table.grad.values().shape[0]


class _Anchored(Function):
    """The identity on its first argument, in place; the second gets an undefined gradient: its ``grad`` stays."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # a view would forbid the caller to change it in place
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


_tie: Any = _Anchored.apply


def _dense_mean(table: nn.Parameter, group: ProcessGroup | None) -> Tensor:
    """Average the gradient of a table that a dense layer shares: dense on some rank, sparse or missing on another."""
    local = table.grad
    total = torch.zeros_like(table) if local is None else local.to_dense().contiguous()
    dist.all_reduce(total, group=group)
    return total.div_(world_size(group))


def _sparse_mean(table: nn.Parameter, rows_of_rank: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Average the rows over all ranks, summed in rank order, so with equal bits on all.

    Args:
        table: Shape (entries, width); its ``grad`` is coalesced or None.
        rows_of_rank: Number of rows in each rank's gradient.
        group: The process group.

    Returns:
        A coalesced gradient with each row that some rank has.
    """
    # all_gather takes equal shapes: shorter gradients are filled up with zeros, which are cut off again.
    longest = max(rows_of_rank)
    indices = torch.zeros(longest, dtype=torch.int64, device=table.device)
    values = table.new_zeros(longest, *table.shape[1:])
    if table.grad is not None:
        rows = table.grad.values().shape[0]
        indices[:rows] = table.grad.indices()[0]
        values[:rows] = table.grad.values()
    all_indices = torch.cat([x[:rows] for x, rows in zip(all_gather(indices, group), rows_of_rank, strict=True)])
    all_values = torch.cat([x[:rows] for x, rows in zip(all_gather(values, group), rows_of_rank, strict=True)])
    # The indices were valid in each rank's gradient: to check them again would wait for the device.
    total = torch.sparse_coo_tensor(all_indices[None], all_values, table.shape, check_invariants=False).coalesce()
    # By all ranks, as DDP divides: where a rank lacks a row, its gradient is zero.
    return total.div_(len(rows_of_rank))
