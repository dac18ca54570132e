"""Servers: `with serve("tinker", models={"tiny": folder}):` in a cell; the room itself can be called, too."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    """A module that is called as its `serve` is: `from nexrl_sdk import serve` gives this module."""

    def __call__(self, *apis: str, **options: Any) -> Any:
        """`nexrl_sdk.serve.api.serve`."""
        from .api import serve

        return serve(*apis, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "serve":
            return self
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Room
