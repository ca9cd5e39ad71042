"""How long a checkpoint stalls training, and how large it is.

    .venv/bin/python bench/checkpoint.py [--gigabytes 1] [--rounds 5] [--folder FOLDER] [--json]
    .venv/bin/python bench/checkpoint.py --device cuda [options as above]

One replica trains a network by SGD with momentum. After each of some steps its state is saved by

    ours     a periodic checkpoint of the trainer: a copy in memory, written by a thread
    async    torch.distributed.checkpoint.async_save of the same tensors
    copy     a copy of the same tensors into memory that is allocated already: the least possible

in turn, in the same process. `stall` is the time until training can continue, the median of the rounds,
without the first round, in which memory is allocated. No contender begins before the writing of the one
before it has ended.

With `--device cuda`, the network is on a GPU. Then `stall` ends when the GPU has passed what was launched in
the stream of the program, and `beside` is the time until our copy is complete: what the optimizer changes is
copied in another stream, beside the next forward and backward passes, and the next optimizer step waits for
it. `copy` copies into pinned memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import device_option
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

from adascale import ElasticTrainer
from adascale_worker.state.schedule import Checkpointing

BATCH = 8


class StallTimer:
    """Measures the time that the trainer's checkpoints stop its loop, and waits for their end."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.writer: Checkpointing | None = None
        own = Checkpointing.start

        def start(writer: Checkpointing, *arguments: Any) -> None:
            self.writer = writer
            own(writer, *arguments)

        Checkpointing.start = start  # type: ignore[method-assign, assignment]

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self.writer is not None:
            self.writer.wait()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters and momentum by name."""
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors[f"momentum.{name}"] = optimizer.state[parameter]["momentum_buffer"]
    return tensors


def end_of_launched(device: torch.device) -> float:
    """Return the time when the device has done what was launched in the stream of the program."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def measure(width: int, rounds: int, folder: Path, device_type: str) -> dict[str, Any]:
    """Train, save in turn, and return the medians in seconds, and the sizes in bytes."""
    torch.manual_seed(0)
    trainer = ElasticTrainer(
        batch_size=BATCH, checkpoint_dir=folder / "ours", checkpoint_interval=0, device=device_type
    )
    device = trainer.device
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    trainer.program_reentry(model, optimizer)
    saved_at_boundary = trainer._training.state.save  # type: ignore[union-attr]
    stalls: dict[str, list[float]] = {"ours": [], "async": [], "copy": []}
    if device.type == "cuda":
        stalls["beside"] = []

    def save(**options: Any) -> None:
        begin = end_of_launched(device)
        saved_at_boundary(**options)
        stalls["ours"].append(end_of_launched(device) - begin)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            stalls["beside"].append(time.perf_counter() - begin)
        timer.wait()
        others()

    def others() -> None:
        tensors = tensors_of(model, optimizer)
        begin = end_of_launched(device)
        response: Any = async_save(tensors, checkpoint_id=folder / "async", no_dist=True)
        stalls["async"].append(end_of_launched(device) - begin)
        getattr(response, "upload_completion", response).result()
        pinned = device.type == "cuda"
        copies = [
            torch.empty_like(tensor, device="cpu", pin_memory=pinned).fill_(0) for tensor in tensors.values()
        ]
        begin = end_of_launched(device)
        for copy, tensor in zip(copies, tensors.values(), strict=True):
            copy.copy_(tensor, non_blocking=pinned)
        stalls["copy"].append(end_of_launched(device) - begin)

    timer = StallTimer()
    trainer._training.state.save = save  # type: ignore[union-attr, method-assign]
    data = torch.randn(4 * BATCH * (rounds + 2), width)
    for x in trainer.dataloader(data):
        optimizer.zero_grad()
        model(x.to(device)).square().mean().backward()
        optimizer.step()
        if len(stalls["ours"]) > rounds:
            break
    state = sum(tensor.nbytes for tensor in tensors_of(model, optimizer).values())
    newest = max((folder / "ours").glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    seconds = {name: statistics.median(times[1:]) for name, times in stalls.items()}
    ratios = [ours / copy for ours, copy in zip(stalls["ours"][1:], stalls["copy"][1:], strict=True)]
    trainer.close()
    return {
        "state_bytes": state,
        "stall_seconds": seconds,
        "ours_to_copy": statistics.median(ratios),
        "ours_to_async": seconds["ours"] / seconds["async"],
        "size_to_state": newest.stat().st_size / state,
    }


def main() -> None:
    """Measure the tiny network and the large one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="parameters and momentum together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the checkpoints; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    device_option.add_to(parser)
    options = parser.parse_args()
    device_option.check(parser, options.device)
    warnings.simplefilter("ignore")
    width = int((options.gigabytes * 1e9 / 2 / 2 / 4) ** 0.5)
    results = {}
    for name, size in (("tiny", 16), ("large", width)):
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=options.folder))
        try:
            results[name] = measure(size, options.rounds, folder, options.device)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, result in results.items():
        stalls = ", ".join(f"{key} {value * 1e3:.2f} ms" for key, value in result["stall_seconds"].items())
        print(
            f"{name}, {result['state_bytes'] / 1e6:,.2f} MB of parameters and momentum: stall {stalls}; "
            f"ours / copy {result['ours_to_copy']:.2f}, ours / async {result['ours_to_async']:.2f}; "
            f"size / state {result['size_to_state']:.3f}"
        )


if __name__ == "__main__":
    main()
