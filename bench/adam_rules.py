"""A study of rules for Adam's learning rate at larger batch sizes, all runs of a scale trained as one tensor.

    OMP_NUM_THREADS=1 python bench/adam_rules.py digits|text [--scales 16 64] [--rates 0.003] [--rules ...]

Readable and separate from the library: Adam, the gain and the rules are written out here for a batch of runs.
Every run trains until its progress reaches T. `bench/RESULTS.md` has what came out of it.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01
MICRO_GRADIENTS = 8


@dataclass(frozen=True)
class Rule:
    """What a step at scale S does.

    Attributes:
        lr: factor of the learning rate, from the scale and the gain.
        counts_gain: whether a step counts as its gain, not as S.
        beta1, beta2: whether the beta is raised to the power of the step's progress.
        least_beta1: below which the first beta does not fall.
        decay: whether the weight decay is per progress.
        metric: "step" is the second moment of the step's gradients, "B0" is that of gradients at B0.
        by: "all" has one gain; "tensor" scales by each tensor's own.
    """

    lr: Callable[[float, Tensor], Tensor]
    counts_gain: bool = True
    beta1: bool = False
    beta2: bool = False
    decay: bool = True
    metric: str = "step"
    by: str = "all"
    least_beta1: float = 0.0


def const(power: float) -> Callable[[float, Tensor], Tensor]:
    return lambda scale, gain: torch.full_like(gain, scale**power)


def power(p: float) -> Callable[[float, Tensor], Tensor]:
    return lambda _, gain: gain**p


RULES = {
    "none": Rule(const(0.0), counts_gain=False, decay=False),
    "sqrt S": Rule(const(0.5), counts_gain=False, decay=False),
    "S": Rule(const(1.0), counts_gain=False, decay=False),
    "sqrt S, betas": Rule(const(0.5), counts_gain=False, beta1=True, beta2=True),
    "gain": Rule(power(1.0), decay=False),
    "gain^.75": Rule(power(0.75)),
    "sqrt gain": Rule(power(0.5), decay=False),
    "sqrt gain, decay": Rule(power(0.5)),
    "sqrt gain, beta2": Rule(power(0.5), beta2=True),
    "sqrt gain, betas": Rule(power(0.5), beta1=True, beta2=True),
    "sqrt gain, betas, beta1 >= 0.6": Rule(power(0.5), beta1=True, beta2=True, least_beta1=0.6),
    "sqrt gain, betas, beta1 >= 0.4": Rule(power(0.5), beta1=True, beta2=True, least_beta1=0.4),
    "sqrt gain, betas, beta1 >= 0.8": Rule(power(0.5), beta1=True, beta2=True, least_beta1=0.8),
    "gain, betas": Rule(power(1.0), beta1=True, beta2=True),
    "gain, beta2": Rule(power(1.0), beta2=True),
    "gain^.75, beta2": Rule(power(0.75), beta2=True),
    "tensor, beta2": Rule(power(0.5), beta2=True, by="tensor"),
    "B0 metric": Rule(power(1.0), metric="B0"),
    "B0 metric, beta2": Rule(power(1.0), beta2=True, metric="B0"),
    "B0 metric, betas": Rule(power(1.0), beta1=True, beta2=True, metric="B0"),
}


@dataclass
class Task:
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    shapes: list[tuple[int, ...]]
    loss: Callable[[list[Tensor], Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor
    score: Callable[[list[Tensor]], float]
    decimals: int = 1

    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        return [piece.view(shape) for piece, shape in zip(flat.split(self.sizes()), self.shapes, strict=True)]

    def init(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        pieces = []
        for shape in self.shapes:
            if len(shape) == 1:
                # vectors that start at 1 are the scales of normalisations, see `text`
                pieces.append(torch.zeros(shape))
            else:
                pieces.append((torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[-1]))
        return torch.cat([piece.flatten() for piece in pieces])


def digits() -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    x_test, y_test = torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test)

    def logits(p: list[Tensor], x: Tensor) -> Tensor:
        return functional.linear(functional.relu(functional.linear(x, p[0], p[1])), p[2], p[3])

    return Task(
        4,
        6000,
        (0.001, 0.003, 0.01),
        [(64, 64), (64,), (10, 64), (10,)],
        lambda p, x, y: functional.cross_entropy(logits(p, x), y),
        torch.tensor(x_train, dtype=torch.float32),
        torch.tensor(y_train),
        lambda p: 100 * (logits(p, x_test).argmax(1) == y_test).float().mean().item(),
    )


CONTEXT, WIDTH, HEADS, LAYERS, BLOCK = 32, 32, 2, 1, 1024


def text() -> Task:
    import sklearn.datasets

    folder = Path(sklearn.datasets.__file__).parent / "descr"
    whole = "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))).lower()
    letters = sorted(set(whole) & set(map(chr, range(128))))
    number = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([number.get(letter, 0) for letter in whole])
    # Every tenth block is for the test, so that both parts have the same kinds of text.
    blocks = codes[: len(codes) // BLOCK * BLOCK].view(-1, BLOCK).unfold(1, CONTEXT + 1, 1)
    is_test = torch.arange(len(blocks)) % 10 == 9
    train, test = blocks[~is_test].flatten(0, 1), blocks[is_test].flatten(0, 1)[::7]
    shapes: list[tuple[int, ...]] = [(len(letters), WIDTH), (CONTEXT, WIDTH)]
    for _ in range(LAYERS):
        shapes += [
            (WIDTH,),
            (3 * WIDTH, WIDTH),
            (WIDTH, WIDTH),
            (WIDTH,),
            (4 * WIDTH, WIDTH),
            (WIDTH, 4 * WIDTH),
        ]
    shapes += [(WIDTH,), (len(letters), WIDTH)]
    mask = torch.full((CONTEXT, CONTEXT), -1e9).triu(1)

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + scale)

    def logits(p: list[Tensor], x: Tensor) -> Tensor:
        h = p[0][x] + p[1]
        for layer in range(LAYERS):
            n1, qkv, out, n2, up, down = p[2 + 6 * layer : 8 + 6 * layer]
            q, k, v = (
                functional.linear(norm(h, n1), qkv)
                .unflatten(-1, (3, HEADS, WIDTH // HEADS))
                .permute(2, 0, 3, 1, 4)
            )
            a = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + mask).softmax(-1) @ v
            h = h + functional.linear(a.transpose(1, 2).flatten(-2), out)
            h = h + functional.linear(functional.gelu(functional.linear(norm(h, n2), up)), down)
        return functional.linear(norm(h, p[-2]), p[-1])

    def loss(p: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(logits(p, x).flatten(0, 1), y.flatten())

    def bits(p: list[Tensor]) -> float:
        return loss(p, test[:, :-1], test[:, 1:]).item() / math.log(2)

    return Task(4, 2000, (0.002, 0.004, 0.008), shapes, loss, train[:, :-1], train[:, 1:], bits, 3)


def train(task: Task, scale: int, runs: list[tuple[str, float, int]]) -> list[dict[str, Any]]:
    """Train all runs (rule, lr, seed) at once."""
    count = len(runs)
    rules = [RULES[name] for name, _, _ in runs]
    lr0 = torch.tensor([lr for _, lr, _ in runs])
    seeds = sorted({seed for _, _, seed in runs})
    seed_of = torch.tensor([seeds.index(seed) for _, _, seed in runs])
    w = torch.stack([task.init(seed) for _, _, seed in runs])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    queues = [torch.empty(0, dtype=torch.int64) for _ in seeds]
    sizes = task.sizes()
    segment = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    micro = min(scale, MICRO_GRADIENTS)
    theta = max(1 - scale / 1000, 0.0)
    size = task.batch_size * scale
    state = {
        "w": w,
        "m": torch.zeros_like(w),
        "v": torch.zeros_like(w),
        "vb": torch.zeros_like(w),
        "stat": torch.zeros(count, len(sizes), 2),
        "weight": torch.zeros(count),
        "lc1": torch.zeros(count),
        "lc2": torch.zeros(count),  # logs of products of betas
        "progress": torch.zeros(count),
        "index": torch.arange(count),
        "gains": torch.zeros(count),
    }
    flags = {
        name: torch.tensor([bool(getattr(rule, name)) for rule in rules])
        for name in ("counts_gain", "beta1", "beta2", "decay")
    }
    b0 = torch.tensor([rule.metric == "B0" for rule in rules])
    least_beta1 = torch.tensor([rule.least_beta1 for rule in rules])
    by_tensor = torch.tensor([rule.by == "tensor" for rule in rules])
    unflatten = task.unflatten
    gradient = grad(lambda flat, x, y: task.loss(unflatten(flat), x, y))
    gradients = vmap(vmap(gradient, in_dims=(None, 0, 0)), in_dims=(0, 0, 0))
    results: list[dict[str, Any]] = [{} for _ in runs]
    step = 0
    while len(state["index"]):
        step += 1
        index = state["index"]
        batches = []
        for number, generator in enumerate(generators):
            while len(queues[number]) < size:
                queues[number] = torch.cat(
                    [queues[number], torch.randperm(len(task.inputs), generator=generator)]
                )
            batches.append(queues[number][:size])
            queues[number] = queues[number][size:]
        chosen = torch.stack(batches)[seed_of[index]].view(len(index), micro, -1)
        g = gradients(state["w"], task.inputs[chosen], task.targets[chosen])
        mean, mean_sq = g.mean(1), g.square().mean(1)
        del g
        rescaled = b0[index][:, None]
        v_metric = torch.where(rescaled, state["vb"], state["v"])
        correction = -torch.expm1(state["lc2"])[:, None]
        if step > 1 and micro > 1:
            v_hat = v_metric / correction
            floor = 1e-3 * v_hat.mean(1, keepdim=True)
            weight = 1 / (torch.maximum(v_hat, floor).sqrt() + EPS).square()
            big_m, big_l = mean.square() * weight, mean_sq * weight
            sqr = (micro * big_m - big_l) / (micro - 1)
            var = (big_l - big_m) * scale / (micro - 1)
            sums = torch.stack(
                [torch.zeros(len(index), len(sizes)).index_add_(1, segment, x) for x in (sqr, var)], -1
            )
            state["stat"] = theta * state["stat"] + (1 - theta) * sums
            state["weight"] = theta * state["weight"] + (1 - theta)
        stat = state["stat"].clamp(min=0)
        total = state["stat"].sum(1).clamp(min=0)
        gain = (total.sum(-1) / (total[:, 1] / scale + total[:, 0])).nan_to_num(1.0).clamp(1, scale)
        gain_of_tensor = (
            (stat.sum(-1) / (stat[..., 1] / scale + stat[..., 0])).nan_to_num(1.0).clamp(1, scale)
        )
        counted = torch.where(flags["counts_gain"][index], gain, torch.full_like(gain, scale))
        factor = torch.stack([rules[i].lr(scale, gain[k]) for k, i in enumerate(index.tolist())])
        lr = lr0[index] * (
            0.01 + 0.99 * torch.cos(math.pi / 2 * (state["progress"] / task.steps).clamp(max=1)) ** 2
        )
        log1 = math.log(BETA1) * torch.where(flags["beta1"][index], counted, 1.0)
        log1 = log1.clamp(min=least_beta1[index].log())
        log2 = math.log(BETA2) * torch.where(flags["beta2"][index], counted, 1.0)
        state["lc1"], state["lc2"] = state["lc1"] + log1, state["lc2"] + log2
        state["m"] = torch.lerp(mean, state["m"], log1.exp()[:, None])
        state["v"] = torch.lerp(mean.square(), state["v"], log2.exp()[:, None])
        if micro > 1:
            coordinate_var = (mean_sq - mean.square()) * (scale / (micro - 1))
            at_b0 = (mean.square() + coordinate_var * (1 - 1 / scale)).clamp(min=0)
        else:
            at_b0 = mean.square()
        state["vb"] = torch.lerp(at_b0, state["vb"], log2.exp()[:, None])
        v = torch.where(rescaled, state["vb"], state["v"])
        update = (state["m"] / -torch.expm1(state["lc1"])[:, None]) / (
            (v / -torch.expm1(state["lc2"])[:, None]).sqrt() + EPS
        )
        per_tensor = (gain[:, None] / gain_of_tensor.sqrt())[:, segment]
        scaled = torch.where(by_tensor[index][:, None], per_tensor, factor[:, None]) * lr[:, None]
        decay = DECAY * lr * torch.where(flags["decay"][index], counted, factor)
        state["w"] = state["w"] * (1 - decay[:, None]) - scaled * update
        state["progress"] = state["progress"] + counted
        state["gains"] = state["gains"] + gain
        bad = ~torch.isfinite(state["w"].sum(1))
        done = (state["progress"] >= task.steps) | bad
        if done.any():
            for k in done.nonzero().flatten().tolist():
                name, rate, seed = runs[index[k]]
                flat = state["w"][k].nan_to_num(0.0)
                pieces = unflatten(flat)
                with torch.no_grad():
                    final = task.loss(pieces, task.inputs[:2000], task.targets[:2000]).item()
                results[index[k]] = {
                    "rule": name,
                    "lr": rate,
                    "seed": seed,
                    "scale": scale,
                    "score": task.score(pieces),
                    "train": final,
                    "iterations": step,
                    "gain": state["gains"][k].item() / step,
                }
            keep = ~done
            state = {name: value[keep] for name, value in state.items()}
    return results


def show(task: Task, results: list[dict[str, Any]]) -> None:
    scales = sorted({r["scale"] for r in results})
    d = task.decimals
    for rate in sorted({r["lr"] for r in results}):
        print(f"\nlr {rate}")
        for rule in dict.fromkeys(r["rule"] for r in results):
            cells = []
            for scale in scales:
                own = [r for r in results if (r["rule"], r["lr"], r["scale"]) == (rule, rate, scale)]
                if not own:
                    cells.append(" " * 24)
                    continue
                scores = [r["score"] for r in own]
                dev = statistics.stdev(scores) if len(scores) > 1 else 0
                iterations = statistics.mean(r["iterations"] for r in own)
                train_loss = statistics.mean(r["train"] for r in own)
                cells.append(
                    f"{statistics.mean(scores):6.{d}f} ±{dev:5.{d}f} {iterations:5.0f} {train_loss:7.4f}"
                )
            print(f"  {rule:32}" + " | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["digits", "text"])
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = {"digits": digits, "text": text}[options.task]()
    if options.steps:
        task.steps = options.steps
    everything: list[dict[str, Any]] = []
    for scale in options.scales:
        begin = time.time()
        rules = options.rules if scale > 1 else ["none"]
        runs = [
            (rule, rate, seed)
            for rule in rules
            for rate in options.rates or task.rates
            for seed in range(options.seeds)
        ]
        everything += train(task, scale, runs)
        print(f"scale {scale}: {len(runs)} runs, {time.time() - begin:.0f} s", flush=True)
        show(task, [r for r in everything if r["scale"] == scale])
        if options.json:
            options.json.write_text(json.dumps(everything))
    show(task, everything)


if __name__ == "__main__":
    main()
