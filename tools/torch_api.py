#!/usr/bin/env python3
"""Prints docs/torch-api.md: the reference of shardmesh.torch, of its docstrings. Needs PyTorch and the package.

  tools/torch_api.py > docs/torch-api.md
"""
from __future__ import annotations

import inspect
import re

import shardmesh.torch
from shardmesh import errors

ERRORS = [*(one.__name__ for one in errors.BY_CODE.values()), "WentBack", "LoadMismatch"]
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
    words = list(ERRORS)
    if isinstance(thing, property):
        shown = f"```\n{name}: {inspect.signature(thing.fget).return_annotation}\n```\n"  # type: ignore[arg-type]
    else:
        made = thing.__init__ if inspect.isclass(thing) else thing
        shown = f"```\n{signature(name, made)}\n```\n"
        words += inspect.signature(made).parameters  # type: ignore[arg-type]
    said = text(inspect.getdoc(thing) or "", words)
    return f"\n{'#' * level} {name}\n\n{shown}" + (f"\n{said}\n" if said else "")


def text(docstring: str, words: list[str]) -> str:
    """What begins with some of `words` and a colon is an item of a list; so is all that follows it in its paragraph."""
    one = f"(?:{'|'.join(words)})"
    names = rf"({one}(?:, {one})*): "
    lines: list[str] = []
    for line in re.sub(rf"(?<=\.) (?={names})", "\n", docstring.strip()).splitlines():
        if item := re.match(names, line):
            if lines and lines[-1] and not lines[-1].startswith(("* ", "  ")):
                lines.append("")
            line = f"* {', '.join(f'`{name}`' for name in item[1].split(', '))}: {line[item.end():]}"
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
            print(entry(3, f"{name}.{inner}", member), end="")


if __name__ == "__main__":
    main()
