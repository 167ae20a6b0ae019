"""TCP ports of this machine, and the metrics that are served at one."""

import socket
import urllib.request


def free_port() -> int:
    """Nobody listens there now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def metrics_text(port: int) -> str:
    """What a process tells Prometheus."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())
