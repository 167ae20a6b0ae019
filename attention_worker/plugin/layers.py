"""Layers that have an indexer, by vLLM's names, and which model they belong to."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torch import Tensor

PAGE = 64
"""Tokens a page; vLLM's indexer has no other, and shares its block table with attention."""

_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Model(StrEnum):
    """Whose forward a layer runs in. Each model has steps of its own."""

    TARGET = "target"
    DRAFT = "draft"


def layer_number(name: str) -> int:
    """Of a layer's name: "model.layers.3.self_attn.indexer.k_cache" -> 3.

    Raises:
        ValueError: there is no number in it.
    """
    found = _NUMBER.search(name)
    if found is None:
        raise ValueError(f"layer: {name!r} has no number (fix: a name like model.layers.3.…)")
    return int(found.group(1))


def model_of(number: int, target_layers: int) -> Model:
    """A draft's layers (MTP) are numbered behind the target's."""
    return Model.TARGET if number < target_layers else Model.DRAFT


def k_caches(names: Mapping[int, str], static_forward_context: Any) -> dict[int, Tensor]:
    """The K cache of each layer, uint8 [pages, page, D+4], as vLLM has bound it.

    Empty before vLLM has allocated them.

    Args:
        names: of the layers, by number.
    """
    caches = {number: static_forward_context[name].kv_cache for number, name in names.items()}
    return {number: cache for number, cache in caches.items() if cache.numel()}
