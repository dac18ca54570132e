"""A program's tests as its reward, each answer run in a sandbox."""

from __future__ import annotations

from nexrl_sdk.rollout.sandbox import CodeEvaluator, Sandbox


class SandboxedTests(CodeEvaluator):
    """The share of a row's hidden tests that the answer's program passes; `eval/tests_passed` and `eval/timeout` tell more."""

    def __init__(self) -> None:
        super().__init__(
            tests="tests",  # the row's column: a list, a test in each entry
            reward="fraction",  # "all": 1 for every test passed, else 0
            sandbox=Sandbox(seconds=10.0, memory=512 << 20, processes=8),
        )
