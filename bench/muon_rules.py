"""Rules for Muon's learning rate at larger batch sizes: the loss and the steps of a transformer.

    OMP_NUM_THREADS=1 python bench/muon_rules.py train [--seeds 2] [--scales 16 64] [--lr 0.01] [--rules ...]
    python bench/muon_rules.py report

The task is `transformer` of bench/accuracy.py with Muon for the matrices of the block and AdamW for the rest,
both with the same lr, of which 0.01 is the best of 0.004, 0.01 and 0.02 at S = 1. A step is worth the lower
one of the two gains, as in ElasticTrainer, and training ends at a progress of T. AdamW has its own rule; r is
the gain of Muon:

- `lr * r`; `lr * sqrt(r)`, with the weight decay times sqrt(r) too.
- `lr * r, momentum ** r`: the momentum at least 0.6, as the first beta of AdamW.
- `lr * sqrt(S)`: for both optimizers, and a step is worth S.

Runs are added to bench/muon_rules.json; `report` writes bench/muon_rules.md from them.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accuracy import MICRO_GRADIENTS, Task, loss_of, transformer
from torch import nn

from adascale_worker.adascale import AdaScale

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "muon_rules.json"
SCALES = (16, 64, 128)

Group = dict[str, Any]
RULES: dict[str, Callable[[Group, float], Group]] = {
    "lr * r": lambda group, r: {"lr": group["lr"] * r},
    "lr * sqrt(r)": lambda group, r: {
        "lr": group["lr"] * math.sqrt(r),
        "weight_decay": group["weight_decay"] * math.sqrt(r),
    },
    "lr * r, momentum ** r": lambda group, r: {
        "lr": group["lr"] * r,
        "momentum": max(group["momentum"] ** r, 0.6),
    },
}
COUNTS_SAMPLES = "lr * sqrt(S)"


def optimizers_of(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    hidden = [
        p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith(("qkv", "out", "mlp"))
    ]
    others = [p for p in model.parameters() if not any(p is each for each in hidden)]
    return [
        torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, fused=True),
    ]


def train(task: Task, rule: str, scale: int, initial: float, seed: int) -> tuple[float, int]:
    """Return the score, and the number of steps."""
    torch.manual_seed(seed)
    model = task.model()
    optimizers, micro = optimizers_of(model, initial), min(scale, MICRO_GRADIENTS)
    elastic = [
        AdaScale(each, world_size=1, scale=float(scale), num_gradients_to_accumulate=micro)
        for each in optimizers
        if rule != COUNTS_SAMPLES and scale > 1
    ]
    if elastic:
        scaling: Any = elastic[0].statistics.rule
        scaling.hyperparameters_at = RULES[rule]
    generator = torch.Generator().manual_seed(seed + 1)
    progress, steps = 0.0, 0
    while progress < task.steps:
        lr = initial * task.lr_at(progress) / task.lr
        for group in (group for each in optimizers for group in each.param_groups):
            group["lr"] = lr if elastic else lr * math.sqrt(scale)
        chosen = torch.randint(len(task.inputs), (scale * task.batch_size,), generator=generator)
        for part in chosen.chunk(micro):
            loss: Any = loss_of(model, task.inputs[part], task.targets[part]) / micro
            loss.backward()
        for each in elastic or optimizers:
            each.step()
            each.zero_grad()
        progress += min((each.gain() for each in elastic), default=float(scale))
        steps += 1
    return task.score(model), steps


def train_all(rules: list[str], scales: list[int], lr: float, seeds: int) -> None:
    task = transformer(torch.device("cpu"))
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(run["rule"], run["scale"], run["lr"], run["seed"]) for run in runs}
    for seed in range(seeds):
        wanted = [(COUNTS_SAMPLES, 1), *((rule, scale) for rule in rules for scale in scales)]
        for rule, scale in wanted:
            if (rule, scale, lr, seed) not in done:
                score, steps = train(task, rule, scale, lr, seed)
                run = {"rule": rule, "scale": scale, "lr": lr, "seed": seed, "score": score, "steps": steps}
                runs.append(run)
                RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
                print(f"{rule}, S = {scale}, seed {seed}: {score:.3f} bits in {steps}", flush=True)


def report() -> None:
    runs = json.loads(RESULTS.read_text())
    columns = sorted({(run["lr"], run["scale"]) for run in runs})
    titles = " | ".join(f"lr {lr:g}, S = {scale}" for lr, scale in columns)
    lines = [f"| | {titles} |", "| --- |" + " --- |" * len(columns)]
    for rule in [*RULES, COUNTS_SAMPLES]:
        cells = []
        for column in columns:
            own = [run for run in runs if (run["rule"], run["lr"], run["scale"]) == (rule, *column)]
            scores, steps = [run["score"] for run in own], [run["steps"] for run in own]
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            mean = f"{statistics.mean(scores):.3f}{spread} bits, {statistics.mean(steps):.0f}" if own else ""
            cells.append(mean)
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.with_suffix(".md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=("train", "report"))
    parser.add_argument("--rules", nargs="+", default=[*RULES, COUNTS_SAMPLES])
    parser.add_argument("--scales", nargs="+", type=int, default=list(SCALES))
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "train":
        train_all(options.rules, options.scales, options.lr, options.seeds)
    else:
        report()


if __name__ == "__main__":
    main()
