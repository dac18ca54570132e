"""Trainers, under the one name that they are imported by: `from nexrl_sdk.trainer import SelfHostedTrainer`."""

from __future__ import annotations

import importlib
from typing import Any

# name -> module: imported on first use
_exports: dict[str, str] = {
    **dict.fromkeys(["BaseTrainer", "Trainer"], "base"),
    "SelfHostedTrainer": "self_hosted",
    "SelfHostedGrpoTrainer": "grpo",
    "SelfHostedCrossEntropyTrainer": "cross_entropy",
    "SelfHostedPpoTrainer": "ppo",
    "SelfHostedOpdTrainer": "opd",
    "RemoteApiTrainer": "remote",
    **dict.fromkeys(["RemoteApiGrpoTrainer", "RemoteApiCrossEntropyTrainer", "RemoteApiOpdTrainer"], "remote_algorithms"),
}

__all__ = [*_exports]


def __getattr__(name: str) -> Any:
    module = _exports.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_exports))}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports})
