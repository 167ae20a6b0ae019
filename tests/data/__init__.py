"""One recorded vLLM step, shipped as `dsa_indexer_recordings` too; `path()` finds the file."""

from pathlib import Path


def path() -> Path:
    """The safetensors file, compressed: names, shapes and origin are listed in recording.py."""
    return Path(__file__).with_name("vllm_0_26_dsv32.safetensors.xz")
