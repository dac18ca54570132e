"""NexRL: post-train language-model agents, from a notebook cell to a cluster."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> module: imported on first use, so that `import nexrl_sdk` costs milliseconds and no torch
_exports: dict[str, str] = {
    **dict.fromkeys(["Trajectory", "Batch", "Datum", "Completion", "SamplingParams", "AdamParams", "NexRLError"], "types"),
    "Recipe": "recipe.config",
    **dict.fromkeys(["Evaluator", "BaseEvaluationTarget", "NexAUEvaluationTarget", "EvaluationRunResult"], "rollout.evaluator"),
    **dict.fromkeys(["SimpleRolloutWorker", "BaseRolloutWorker"], "rollout.worker"),
    **dict.fromkeys(["Agent", "AgentRolloutWorker", "BaseNexAURolloutWorker", "PigLatinRolloutWorker"], "rollout.agent"),
    "AgentConfig": "rollout.agent_config",
    "Session": "rollout.session",
    **dict.fromkeys(["ExactMatch", "FuzzyMatch", "Numeric", "Maths", "JSONFormat", "Cached"], "rollout.rewards"),
    "Judge": "rollout.judge",
    **dict.fromkeys(["Sandbox", "CodeEvaluator"], "rollout.sandbox"),
    "Rollouts": "rollout.rollouts",
    "TrajectoryPool": "rollout.pool",
    "WeightSyncController": "rollout.sync",
    "Backend": "backend.base",
    "LocalBackend": "backend.local",
    "SelfHostedBackend": "backend.self_hosted",
    **dict.fromkeys(["HTTPTrainServiceClient", "MockTrainServiceClient", "create_train_service_client"], "backend.http"),
    "OpenAIInferenceClient": "backend.inference",
    **dict.fromkeys(["VLLMServer", "VLLMEngine"], "backend.vllm"),
    "start_train_service": "backend.train_server",
    **dict.fromkeys(["TinkerBackend", "TinkerServiceHolder"], "backend.tinker"),
    **dict.fromkeys(["WeaverBackend", "WeaverServiceHolder"], "backend.weaver"),
    "serve": "serve",
    **dict.fromkeys(["CaptureProxy", "proxied"], "serve.openai"),
    "ChatClient": "rollout.chat",
    "WorkerGroup": "serve.workers",
    "MockBackend": "backend.mock",
    **dict.fromkeys(["Trainer", "BaseTrainer"], "trainer.base"),
    "SelfHostedTrainer": "trainer.self_hosted",
    "SelfHostedGrpoTrainer": "trainer.grpo",
    "SelfHostedCrossEntropyTrainer": "trainer.cross_entropy",
    "SelfHostedPpoTrainer": "trainer.ppo",
    "SelfHostedOpdTrainer": "trainer.opd",
    "RemoteApiTrainer": "trainer.remote",
    **dict.fromkeys(["RemoteApiGrpoTrainer", "RemoteApiCrossEntropyTrainer", "RemoteApiOpdTrainer"], "trainer.remote_algorithms"),
    "Run": "run.store",
    "run_recipe": "launch.runner",
}

__all__ = ["__version__", *_exports]


def __getattr__(name: str) -> Any:
    module = _exports.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers: {', '.join(sorted(_exports))}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_exports})
