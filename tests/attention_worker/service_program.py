"""A service on a GPU that does not tune: `python -m tests.attention_worker.service_program SOCKET`.

Tuned kernels select the same bits, and tuning takes longer than the tests.
"""

import logging
import sys
from unittest.mock import patch

from indexer_service import server
from indexer_service.kernels import warm_up
from indexer_service.settings import Settings


def main(socket: str, device: str = "cuda:0") -> None:
    logging.basicConfig(level=logging.WARNING)
    with patch.object(warm_up, "tuned_operations", lambda geometry, device: iter(())):
        server.run(Settings(address=f"unix:{socket}", device=device))


if __name__ == "__main__":
    main(*sys.argv[1:])
