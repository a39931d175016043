"""What the modules of a model return in forward, as digests: they tell where a run and its replay began to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.run.plan import TrainPlan
from harness.run.record import joined
from harness.training.batch import tensors_in
from harness.training.digest import Digests, tensor_digest


@contextmanager
def activations(model: nn.Module, plan: TrainPlan) -> Iterator[Digests]:
    """Yield what fills with module -> digest of the tensors that it returns, in the order in which modules return.

    A module's further calls have their number behind the name. Nothing fills where the plan asks for a quick verification, or
    for a compiled model, whose modules return nothing one by one.
    """
    outputs: Digests = {}
    calls: Counter[str] = Counter()
    looks = plan.compare in ("full", "audit") and not plan.compile
    watched = [(name, m) for name, m in model.named_modules() if looks and not isinstance(m, torch.jit.ScriptModule)]
    handles = [module.register_forward_hook(partial(_keep, outputs, calls, name or "the model")) for name, module in watched]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@torch.compiler.disable  # a compiled submodule would trace what is done here
def _keep(outputs: Digests, calls: Counter[str], name: str, _module: nn.Module, _args: Any, output: Any) -> None:
    calls[name] += 1
    call = f"{name}, call {calls[name]}" if calls[name] > 1 else name
    # Within torch.func's transforms, such as vmap, tensors have no bits of their own, and only a private function tells them.
    plain = [tensor for tensor in tensors_in(output) if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]
    outputs[call] = joined({str(number): tensor_digest(tensor) for number, tensor in enumerate(plain)})
