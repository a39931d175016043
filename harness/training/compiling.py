"""``compile=true``: torch's compiler, where it works."""

from __future__ import annotations

import functools

import torch
from torch import nn

from harness.errors import ConfigError


def compiled(model: nn.Module) -> nn.Module:
    """Return the model, whose forward is compiled when it is first called; names and parameters stay.

    Raises:
        ConfigError: Nothing can be compiled here.
    """
    _require_compiler()
    # In place: torch.compile(model) returns a wrapper, which puts a prefix before every name of a state.
    model.compile()
    return model


@functools.cache
def _require_compiler() -> None:
    # In this process: workers of its own would outlive a rank that is killed. torch has no public setting for it.
    torch._inductor.config.compile_threads = 1
    try:
        # Nothing is compiled before it is called: a small function shows at once whether a compiler is there.
        torch.compile(torch.sin)(torch.zeros(2))
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"compile=true does not work here ({text}). Install a C++ compiler, or use compile=false.") from error
