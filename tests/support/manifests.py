"""Manifests of checkpoints, for tests that read no state."""

from adascale_core.checkpoint_manifest import Manifest


def make_manifest(
    number: int = 1,
    *,
    step: int = 9,
    progress: float = 9.0,
    finished: bool = False,
    result: dict[str, float | str] | None = None,
) -> Manifest:
    """A manifest whose state does not exist."""
    return Manifest(
        number=number,
        state=f"checkpoint-{number:08d}-00000000.safetensors",
        bytes=1,
        header_bytes=1,
        chunk_bytes=1,
        sha256=["00ff"],
        step=step,
        progress=progress,
        epoch=0,
        replicas=1,
        generation=1,
        saved_at=1_700_000_000.0,
        finished=finished,
        result=result or {},
    )
