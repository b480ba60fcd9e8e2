"""The page as a browser shows it: every figure is drawn, nothing fails or is refused, nothing is wider than the window.

Needs a chromium; its own profile is a fresh folder, and it is told to talk to nobody.
"""

import shutil
import subprocess

import pytest

from pdserve.loadtest.report.document import Document
from pdserve.loadtest.report.page import render
from pdserve.loadtest.report.run_page import make_page
from pdserve.loadtest.report.search_page import Searched, make_search_page
from tests.loadtest.report.pages import HOSTILE, Elements, figures_of
from tests.loadtest.report.runs import PROMISES, make_gauges, make_report, make_told
from tests.loadtest.report.test_search_page import make_result

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# How much wider than the window the page is.
PROBE = """<script>
const root = document.documentElement;
addEventListener("load", () => { document.body.dataset.overflow = root.scrollWidth - root.clientWidth; });
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium to look with"),
]


def make_run_page() -> str:
    records = [make_told(i, 0.5 * i) for i in range(20)]
    return render(make_page(make_report(records, gauges=make_gauges(), notes=("n" * 500,), model="m" * 200 + HOSTILE)))


def make_ab_page() -> str:
    servers = [Searched(name, make_result(), make_report()) for name in ("both", "1P:1D", HOSTILE)]
    document = Document("A/B of " + "m" * 200, "ten requests", (), ())
    return render(make_search_page(document, servers, PROMISES, 0.9, "Splitting pays."))


def look_at(text: str, folder, width: int, is_dark: bool) -> tuple[str, str]:
    """The page after its scripts have run, and what the browser's console said."""
    path = folder / "page.html"
    path.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        "--virtual-time-budget=20000",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={width},900",
        *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("make", [make_run_page, make_ab_page], ids=["run", "ab"])
@pytest.mark.parametrize(("width", "is_dark"), [(1366, False), (700, True)], ids=["laptop, light", "narrow, dark"])
def test_every_figure_is_drawn_and_fits(make, width, is_dark, tmp_path):
    text = make()
    dom, console = look_at(text, tmp_path, width, is_dark)
    assert console == ""
    plots = dom.split('<div class="plot js-plotly-plot"')[1:]
    assert len(plots) == len(figures_of(text))
    assert all('<svg class="main-svg"' in plot for plot in plots)
    assert Elements(dom).of("body")[0]["data-overflow"] == "0"
