#!/usr/bin/env python3
"""Lints one Containerfile or compose file. Usage: lint_deploy.py FILE (from the repository's root).

Containerfile: known instructions; every stage and ARG that is used is defined before; what COPY takes from the context
exists; apt-get as "update && ... install --yes --no-install-recommends ... && rm -rf /var/lib/apt/lists/*" in one layer; no
tag "latest"; final stages do not run as root; ENTRYPOINT and CMD are JSON lists.
compose: parses; every service has an image or a build whose file and target exist; depends_on, network_mode and volumes
name things that are there.
"""
import json
import os
import re
import sys

KNOWN = {"FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD", "LABEL", "SHELL"}


def instructions(text):
    """(line number, instruction, rest), continuation lines joined and comments dropped."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not joined):
            continue
        start = start if joined else number
        joined += line.rstrip("\\")
        if not line.endswith("\\"):
            word, _, rest = joined.strip().partition(" ")
            yield start, word, " ".join(rest.split())
            joined = ""
    if joined:
        yield start, "ENDS-IN-BACKSLASH", ""


def lint_apt(rest):
    install = re.findall(r"apt-get install", rest)
    if install and "apt-get update" not in rest:
        yield "apt-get install without apt-get update in the same RUN"
    if install and len(re.findall(r"apt-get install --yes --no-install-recommends", rest)) != len(install):
        yield "apt-get install without --yes --no-install-recommends"
    if install and "rm -rf /var/lib/apt/lists/*" not in rest:
        yield "apt's lists are not removed in the same RUN"


def lint_copy(rest, stages):
    words = rest.split()
    source = [w.split("=", 1)[1] for w in words if w.startswith("--from=")]
    if source and source[0] not in stages:
        yield f"COPY --from={source[0]}: no such stage before"
    for path in [] if source else [w for w in words if not w.startswith("--")][:-1]:
        if not os.path.exists(path):
            yield f"COPY {path}: not in the repository"


def lint_containerfile(text):
    stages, arguments, users, last = {}, set(), {}, None
    for number, word, rest in instructions(text):
        found = []
        if word not in KNOWN:
            found.append(f"unknown instruction {word}")
        elif word == "ARG":
            arguments.add(rest.split("=")[0])
        elif word == "FROM":
            base, _, name = rest.partition(" AS ")
            known = base in stages or (base.startswith("${") and base[2:-1] in arguments)
            if not known and (":" not in base or base.endswith(":latest")):
                found.append(f"FROM {base}: give a fixed tag, a stage or an ARG that was defined")
            last = name or str(len(stages))
            stages[last], users[last] = base, users.get(base, "root")
        elif last is None:
            found.append(f"{word} before the first FROM")
        elif word == "USER":
            users[last] = rest
        elif word == "RUN":
            found += lint_apt(rest)
        elif word == "COPY":
            found += lint_copy(rest, stages)
        elif word in ("ENTRYPOINT", "CMD", "VOLUME", "SHELL"):
            try:
                json.loads(rest)
            except ValueError:
                found.append(f"{word} is not a JSON list")
        yield from (f"line {number}: {reason}" for reason in found)
    if not stages:
        yield "no FROM"
    used = set(stages.values()) | set(re.findall(r"--from=(\S+)", text))
    yield from (f"stage {s} runs as root" for s in stages if s not in used and users[s] == "root")


def lint_service(name, service, document, folder):
    build = service.get("build")
    if not build and not service.get("image"):
        yield f"{name}: neither image nor build"
    if build:
        context = os.path.normpath(os.path.join(folder, build["context"]))
        path = os.path.normpath(os.path.join(context, build.get("dockerfile", "Containerfile")))
        if not os.path.exists(path):
            yield f"{name}: {path} does not exist"
        elif not re.search(rf"^FROM .* AS {re.escape(build['target'])}$", open(path, encoding="utf-8").read(), re.M):
            yield f"{name}: {path} has no stage {build['target']}"
    linked = list(service.get("depends_on", []))
    linked += [service[key].split(":", 1)[1] for key in ("network_mode", "ipc", "pid") if str(service.get(key)).startswith("service:")]
    yield from (f"{name}: no service {other}" for other in linked if other not in document["services"])
    for volume in service.get("volumes", []):
        source = volume.split(":")[0] if isinstance(volume, str) else volume["source"]
        if not source.startswith((".", "/")) and source not in document.get("volumes", {}):
            yield f"{name}: no volume {source}"


def lint_compose(path):
    import yaml
    with open(path, encoding="utf-8") as source:
        document = yaml.safe_load(source)
    if not isinstance(document, dict) or not document.get("services"):
        yield "no services"
        return
    for name, service in document["services"].items():
        yield from lint_service(name, service, document, os.path.dirname(path))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = sys.argv[1]
    try:
        if path.endswith((".yaml", ".yml")):
            bad = list(lint_compose(path))
        else:
            with open(path, encoding="utf-8") as source:
                bad = list(lint_containerfile(source.read()))
    except Exception as error:  # a parser's own message is the report
        bad = [f"{type(error).__name__}: {error}"]
    print("\n".join(bad) if bad else f"{path}: ok")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
