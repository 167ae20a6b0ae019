"""Times for people: a layer takes microseconds on a GPU and milliseconds on a CPU."""

_UNITS = ((1000.0, "s", 1e-3), (1.0, "ms", 1.0), (0.0, "µs", 1e3))
"""From so many milliseconds on; the unit; of which a millisecond is so many."""


def duration(milliseconds: float) -> str:
    """Three digits and the unit that fits: "8.25 µs", "12.4 ms", "3.0 s"."""
    unit, factor = next((unit, by) for least, unit, by in _UNITS if milliseconds >= least)
    value = milliseconds * factor
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
