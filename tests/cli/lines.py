"""What a command printed, as tests look at it."""


def one_line(text: str) -> str:
    """The one line that `text` must be."""
    assert "Traceback" not in text, text
    (line,) = text.strip().splitlines()
    return line
