"""Measures what of the site's tables is out of view: ``make docs``, then ``site_tables.py [WIDTH …]``, in Chromium.

Each page is laid out in frames as wide as a phone's, a laptop's and a large screen. A table is cut if it, a cell of it,
the page or a box in which it scrolls is wider than what can be seen of it. One line for each cut table: pixels out of
view, width, page, first words.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

SITE = Path(__file__).parent.parent / "site"
WIDTHS = (390, 1366, 1920)
_HARNESS = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = [];
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px`;
  await new Promise(done => { frame.onload = done; frame.src = page; document.body.append(frame); });
  for (const table of frame.contentDocument.querySelectorAll("article table")) {
    const boxes = [table, ...table.querySelectorAll("th, td")];  // a word may be longer than its cell
    let cut = Math.max(...boxes.map(box => box.scrollWidth - box.clientWidth));
    const right = table.getBoundingClientRect().right;
    for (let box = table.parentElement; box; box = box.parentElement)
      if (box.tagName == "HTML" || frame.contentWindow.getComputedStyle(box).overflowX != "visible")
        cut = Math.max(cut, box.scrollWidth - box.clientWidth, right - box.getBoundingClientRect().right);
    if (cut > 1) found.push([Math.round(cut), width, page, table.innerText.slice(0, 50)]);
  }
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await measure(page, width);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class _Site(SimpleHTTPRequestHandler):
    """The site's files, and one address to which the browser posts what it has measured."""

    found: Queue[list[Any]] = Queue()

    def do_POST(self) -> None:  # the name that the library calls
        """Take the measurements."""
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def measured(widths: tuple[int, ...]) -> list[Any]:
    """All cut tables of the built site."""
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        sys.exit("site_tables.py needs Chromium on the path")
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")
    harness = SITE / "measure.html"
    harness.write_text(_HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(widths)))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Site, directory=str(SITE)))
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        words += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
        words += ["--remote-debugging-port=0", f"http://127.0.0.1:{server.server_port}/{harness.name}"]
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return _Site.found.get(timeout=1200)
        finally:
            running.terminate()
            running.wait()
            harness.unlink()
            server.shutdown()


if __name__ == "__main__":
    rows = measured(tuple(map(int, sys.argv[1:])) or WIDTHS)
    for cut, width, page, words in sorted(rows, reverse=True):
        print(f"{cut:>5} px of a table at {width:>4}: {page} {' '.join(words.split())!r}")
    print(f"{len(rows)} tables are cut")
