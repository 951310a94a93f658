#!/usr/bin/env python3
"""Prints docs/torch-api.md: the reference of shardmesh.torch, of its docstrings. Needs PyTorch and the package.

  tools/torch_api.py > docs/torch-api.md
"""
from __future__ import annotations

import inspect
import re

import shardmesh.torch

HEAD = """# Reference of shardmesh.torch

Made of the docstrings by `tools/torch_api.py`. [torch.md](torch.md) starts from tasks.
"""


def signature(name: str, call: object) -> str:
    of_call = inspect.signature(call)  # type: ignore[arg-type]
    arguments, keyword_only = [], False
    for one in of_call.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            arguments.append("*")
        arguments.append(argument(one))
    after = "" if of_call.return_annotation in (of_call.empty, "None") else f" -> {of_call.return_annotation}"
    line = f"{name}({', '.join(arguments)}){after}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){after}"


def argument(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {one.annotation}"
    default = "" if one.default is one.empty else f" = {one.default!r}" if kind else f"={one.default!r}"
    return f"{stars}{one.name}{kind}{default}"


def entry(level: int, name: str, thing: object) -> str:
    made = thing.__init__ if inspect.isclass(thing) else thing  # type: ignore[misc]
    shown = f"```\n{signature(name, made)}\n```\n\n" if callable(thing) and not isinstance(thing, property) else ""
    return f"\n{'#' * level} {name}\n\n{shown}{text(inspect.getdoc(thing) or '')}\n"


def text(docstring: str) -> str:
    """What begins with words and a colon is an item of a list."""
    lines = []
    for line in docstring.strip().splitlines():
        item = re.match(r"([A-Za-z_][A-Za-z_, ]*): ", line)
        if item:
            names = ", ".join(f"`{one}`" for one in item[1].split(", "))
            line = f"* {names}: {line[item.end():]}"
        elif lines and lines[-1].startswith(("* ", "  ")) and line:
            line = "  " + line
        lines.append(line)
    return "\n".join(lines)


def own(thing: type) -> list[tuple[str, object]]:
    members = [(name, member) for name, member in vars(thing).items() if not name.startswith("_")]
    return [(name, member) for name, member in members if isinstance(member, property) or inspect.isfunction(member)]


def main() -> None:
    print(HEAD, end="")
    for name in shardmesh.torch.__all__:
        thing = getattr(shardmesh.torch, name)
        print(entry(2, name, thing), end="")
        for inner, member in own(thing) if inspect.isclass(thing) else []:
            if inspect.getdoc(member):
                print(entry(3, f"{name}.{inner}", member), end="")


if __name__ == "__main__":
    main()
