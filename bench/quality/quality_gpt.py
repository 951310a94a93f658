#!/usr/bin/env python3
"""What formats of weights, states and *gathered* weights cost in quality: the example's GPT of 10 million parameters.

Trains examples/gpt with shardmesh.torch.Optimizer, which gathers weights in the format it is given, from the same
starts and on the same batches in every format, and prints a table of held-out losses. Each finished run is written to
the file of --json, and one that is there is not repeated: the program can be stopped and started again.

Needs shardmesh, its programs, and torch. To print what is finished, and to add the runs that are missing:
  python bench/quality/quality_gpt.py --table
  python bench/quality/quality_gpt.py
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/gpt"))

import torch  # noqa: E402

import shardmesh.torch as sm  # noqa: E402
from model import GPT, SIZES  # noqa: E402
from quality_report import number, spread  # noqa: E402
from run import held_out_loss, warm_up  # noqa: E402
from text import Text  # noqa: E402
from train import in_blocks  # noqa: E402

SLOTS, SEQUENCES, LENGTH = 2, 4, 64
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Arm(NamedTuple):
    weights: str
    states: str
    gather: str  # of the matrices of the blocks; others come as stored


BASE = Arm("fp32", "fp32", "stored")
ARMS = (
    BASE, Arm("fp32", "dyn8", "fp8_tensor"), Arm("bf16_sr", "dyn8", "fp8_tensor"), Arm("fp32", "fp32", "fp8_tensor"),
    Arm("bf16_sr", "dyn8", "stored"), Arm("bf16_sr", "fp32", "fp8_tensor"), Arm("fp32", "dyn8", "stored"),
    Arm("bf16_sr", "fp32", "stored"),
)
RESULTS = Path(__file__).resolve().parents[1] / "results/quality_gpt.json"
Run = tuple[Arm, int]  # and seed
Losses = list[tuple[int, float]]  # held out, by steps


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", default="10m", choices=list(SIZES), help="of the model, in parameters (default: %(default)s)")
    add("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    add("--every", type=int, default=25, help="steps between two held-out losses (default: %(default)s)")
    add("--seeds", type=int, default=5, help="runs of each format (default: %(default)s)")
    add("--arms", type=int, default=len(ARMS), help="the first so many formats (default: all %(default)s)")
    add("--perturb", type=int, default=0, metavar="DRAW",
        help="multiply first weights by 1 + 2^-10 of a normal draw of that number; 0: as they are (default)")
    add("--table", action="store_true", help="train nothing; print what is finished")
    add("--json", type=Path, default=RESULTS, metavar="FILE",
        help="of settings and every run: read, if it is there, and written (default: that of docs/quality.md)")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    settings = {"size": options.size, "steps": options.steps, "slots": SLOTS, "sequences": SEQUENCES, "length": LENGTH,
                **HYPERPARAMETERS}
    if options.perturb:
        settings["perturb"] = options.perturb
    settings = json.loads(json.dumps(settings))
    runs = finished(options.json, settings)
    wanted = [] if options.table else [(arm, seed) for seed in range(options.seeds) for arm in ARMS[: options.arms]]
    for arm, seed in wanted:
        if (arm, seed) not in runs:
            runs[arm, seed] = losses = trained(arm, seed, options)
            write(options.json, settings, runs)
            print(f"{', '.join(arm)}, seed {seed}: {losses[-1][1]:.4f}", file=sys.stderr, flush=True)
    print(table(runs))


def trained(arm: Arm, seed: int, options: argparse.Namespace) -> Losses:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text, model = Text.load(seed=seed), GPT(SIZES[options.size])
    length = min(LENGTH, model.size.context)
    if options.perturb:
        perturbed(model, options.perturb)
    losses = [(0, held_out_loss(model, text, length))]
    with sm.Optimizer(model, "AdamW", slots=SLOTS, weights=arm.weights, states=arm.states, gather=in_blocks(arm.gather),
                      seed=seed, **HYPERPARAMETERS) as optimizer:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        for step in range(options.steps):
            for slot in range(SLOTS):
                model(*text.batch(step, slot, SEQUENCES, length)).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if (step + 1) % options.every == 0 or step + 1 == options.steps:
                losses.append((step + 1, held_out_loss(model, text, length)))
    return losses


@torch.no_grad()
def perturbed(model: GPT, draw: int) -> None:
    """By much less than any format here rounds: what comes of it is no format's."""
    generator = torch.Generator().manual_seed(1000 + draw)
    for parameter in model.parameters():
        parameter.mul_(1 + 2**-10 * torch.randn(parameter.shape, generator=generator))


def finished(file: Path, settings: dict[str, Any]) -> dict[Run, Losses]:
    """What the file has. Ends the program if that is of other settings."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())
    if found["settings"] != settings:
        sys.exit(f"{file} has runs of {found['settings']}; for runs of {settings} name another file by --json")
    return {(Arm(run["weights"], run["states"], run["gather"]), run["seed"]): run["losses"] for run in found["runs"]}


def write(file: Path, settings: dict[str, Any], runs: dict[Run, Losses]) -> None:
    listed = [{**arm._asdict(), "seed": seed, "losses": losses} for (arm, seed), losses in runs.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"settings": settings, "runs": listed}, indent=1) + "\n")
    os.replace(partial, file)


def table(runs: dict[Run, Losses]) -> str:
    """In Markdown. Differences are those of runs of one seed."""
    columns = ("weights", "states", "gathered as", "seeds", "held-out loss", "spread", "difference to fp32",
               "its error")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    final = {key: losses[-1][1] for key, losses in runs.items()}
    for arm in ARMS:
        of_seed = {seed: loss for (other, seed), loss in final.items() if other == arm}
        if not of_seed:
            continue
        apart = [loss - final[BASE, seed] for seed, loss in of_seed.items() if (BASE, seed) in final]
        error = number(spread(apart) / math.sqrt(len(apart)), 3) if apart else ""
        difference = "| |" if arm == BASE or not apart else f"{fmean(apart):+.3f} | {error} |"
        lines.append(f"| {' | '.join(arm)} | {len(of_seed)} | {fmean(of_seed.values()):.3f} | "
                     f"{number(spread(list(of_seed.values())), 3)} | {difference}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
