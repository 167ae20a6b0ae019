"""The page of `dsa-indexer trace --html`, as a browser shows it."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dsa_indexer_cli.trace.html import write_html
from dsa_indexer_cli.trace.spans import read_trace_file
from dsa_indexer_cli.trace.timeline import Timeline, timelines
from tests.support.browser import needed_browser, screenshot
from tests.support.trace_lines import LAYERS, TIMES, finding, step_lines, write

HOSTILE = "</script><script>console.error('injected')</script>"


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    """A step with two findings, one of them with markup in it."""
    told = [
        finding("dsa.gate", 3, 150_000, **{"dsa.expected": "4096", "dsa.seen": HOSTILE}),
        finding("dsa.handback", 7, 150_000, **{"dsa.request": "cmpl-17", "dsa.row": 2}),
    ]
    path = write(tmp_path / "t.jsonl", *step_lines(3, findings=told))
    return timelines(read_trace_file(path).spans)[0]


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_every_bar_says_the_clock_and_needs_nothing_else(
    timeline: Timeline, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    write_html(timeline, out)
    page = _Page(out.read_text())
    bars = [of for tag, of in page.tags if tag == "g" and (of.get("class") or "").startswith("bar")]
    assert len(bars) == len(LAYERS) * len(TIMES)
    signs = [of for tag, of in page.tags if (of.get("class") or "").startswith("finding")]
    assert len(signs) == 2
    assert timeline.clock in page.text
    assert HOSTILE in page.text
    for tag, of in page.tags:
        assert tag not in ("img", "iframe", "object")
        for name in ("src", "href"):
            assert (of.get(name) or "data:").startswith("data:"), tag


def test_a_browser_shows_it_without_a_complaint(timeline: Timeline, tmp_path: Path) -> None:
    program, out, picture = needed_browser(), tmp_path / "page.html", tmp_path / "page.png"
    write_html(timeline, out)
    assert screenshot(program, out, picture, tmp_path / "profile") == []
    image = Image.open(picture).convert("RGB")
    seen = {colour for count, colour in image.getcolors(2**24) or () if count > 20}
    # Staging, hand-back, gate, logits and top-k, and the marks of findings.
    for wanted in ("3b6fb6", "5aa2c9", "a89f8d", "d98a3d", "c2603a", "c01c28"):
        assert tuple(bytes.fromhex(wanted)) in seen, wanted


def test_a_complaint_of_the_page_is_seen(timeline: Timeline, tmp_path: Path) -> None:
    program, out = needed_browser(), tmp_path / "page.html"
    write_html(timeline, out)
    out.write_text(out.read_text().replace("show();\n</script>", "nobody();\n</script>"))
    (said,) = screenshot(program, out, tmp_path / "page.png", tmp_path / "profile")
    assert "nobody is not defined" in said


USED = """
<script>
const bar = bars[0], width = () => Number(bar.querySelector("rect").getAttribute("width"));
const before = width(), box = svg.getBoundingClientRect();
bar.dispatchEvent(new PointerEvent("pointerenter"));
const at = { clientX: box.left + box.width / 8, clientY: box.top };
svg.dispatchEvent(new WheelEvent("wheel", { deltaY: -1, ...at }));
const zoomed = width();
svg.dispatchEvent(new MouseEvent("dblclick"));
const said = details.textContent.split("\\n")[0];
console.log(said, (zoomed / before).toFixed(3), (width() / before).toFixed(3));
</script>
"""


def test_pointing_tells_details_and_the_wheel_zooms(timeline: Timeline, tmp_path: Path) -> None:
    program, out = needed_browser(), tmp_path / "page.html"
    write_html(timeline, out)
    out.write_text(out.read_text().replace("</body>", f"{USED}</body>"))
    (said,) = screenshot(program, out, tmp_path / "page.png", tmp_path / "profile")
    assert "dsa.stage, layer 0: 1.600 µs, well 1.250 1.000" in said
