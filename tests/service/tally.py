"""Counts in one line."""

from collections import Counter


def tally(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name.lower()}" for name, count in counts.most_common())
