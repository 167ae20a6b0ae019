"""The README's examples: the client's runs as it stands, the others name what there is."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

REQUESTS, LENGTHS = 2, [100, 200]


def examples(repository: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)


def test_a_session_works_inline_until_a_service_is_there(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSA_INDEXER_ADDRESS", f"unix:{tmp_path}/nobody/i.sock")
    names: dict[str, Any] = {
        "rows": REQUESTS,
        "query_start": torch.arange(REQUESTS + 1, dtype=torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": torch.zeros(REQUESTS, 1024, dtype=torch.int32),
        "q": [torch.randn(REQUESTS, 64, 128).to(torch.float8_e4m3fn) for _ in range(2)],
        "weights": [torch.randn(REQUESTS, 64) for _ in range(2)],
        "topk_indices": torch.empty(REQUESTS, 2048, dtype=torch.int32),
    }
    exec(examples(repository)[0], names)
    for row, length in zip(names["topk_indices"].tolist(), LENGTHS, strict=True):
        assert row == [*range(length), *[-1] * (2048 - length)]


def test_what_the_examples_import_is_there(repository: Path) -> None:
    imports = [
        line
        for example in examples(repository)
        for line in example.splitlines()
        if line.startswith(("import ", "from "))
    ]
    assert len(imports) > 5
    exec("\n".join(imports))
