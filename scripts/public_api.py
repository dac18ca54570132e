"""Every public name imports, and says what it takes, what it gives, and what it is for; exits with 1 where one does not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import nexrl_sdk

INHERITED = (object, BaseException, dict, list, tuple)


def modules() -> list[ModuleType]:
    """All modules of the package."""
    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(nexrl_sdk.__path__, "nexrl_sdk.") if not m.name.endswith("_modidx")]


def documented(value: Any) -> str | None:
    """What is wrong with a docstring, if anything."""
    doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__doc__
    if not doc or not doc.strip():
        return "has no docstring"
    if inspect.isclass(value) and hasattr(value, "__dataclass_fields__") and doc.startswith(f"{value.__name__}("):
        return "has no docstring"
    first, *rest = doc.strip().splitlines()
    if rest and rest[0].strip():
        return f"has a docstring whose first line does not stand alone: {first!r}"
    return None


def unannotated(function: Any) -> str | None:
    """Which parameters, or the return, lack an annotation."""
    signature = inspect.signature(function)
    names = [n for i, (n, p) in enumerate(signature.parameters.items()) if p.annotation is p.empty and not (i == 0 and n in ("self", "cls", "mcs"))]
    if signature.return_annotation is signature.empty and function.__name__ != "__init__":
        names.append("return")
    return f"lacks annotations: {', '.join(names)}" if names else None


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """A class's own public methods and properties, and its hand-written `__init__`."""
    for name, value in vars(cls).items():
        if name == "__init__" and inspect.isfunction(value) and not hasattr(cls, "__dataclass_fields__") and not getattr(cls, "_is_protocol", False):
            yield name, value
        if name.startswith("_"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property) or inspect.isfunction(value):
            yield name, value


def overrides(cls: type, name: str) -> bool:
    """Whether a base class documents this member already."""
    return any(inspect.getdoc(getattr(base, name, None)) for base in cls.__mro__[1:] if base not in INHERITED and hasattr(base, name))


def offences_of(path: str, value: Any, *, methods: bool) -> Iterator[str]:
    """Everything that is wrong with one public name; `methods`: a class's methods need docstrings too."""
    if inspect.isclass(value):
        if fault := documented(value):
            yield f"{path} {fault}"
        for name, member in members(value):
            function = member.fget if isinstance(member, property) else member
            if methods and name != "__init__" and not overrides(value, name) and (fault := documented(function)):
                yield f"{path}.{name} {fault}"
            if fault := unannotated(inspect.unwrap(function)):
                yield f"{path}.{name} {fault}"
    elif inspect.isfunction(value):
        yield from (f"{path} {fault}" for fault in (documented(value), unannotated(inspect.unwrap(value))) if fault)


def offences() -> Iterator[str]:
    """Everything that is wrong with the public names."""
    for name in nexrl_sdk.__all__:
        try:
            value = getattr(nexrl_sdk, name)
        except (ImportError, AttributeError) as e:
            yield f"nexrl_sdk.{name} does not import: {e}"
            continue
        yield from offences_of(f"nexrl_sdk.{name}", value, methods=True)
    for module in modules():
        if not (module.__doc__ or "").strip() and not hasattr(module, "__path__"):
            yield f"{module.__name__} has no docstring"
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name, None)
            if value is None and name not in vars(module):
                yield f"{module.__name__}.{name} is named in __all__ and does not exist"
            elif getattr(value, "__module__", None) == module.__name__:
                yield from offences_of(f"{module.__name__}.{name}", value, methods=False)


def main() -> None:
    """Print what is wrong."""
    found = sorted(set(offences()))
    print("\n".join(found) or "every public name imports, is annotated and documented")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
