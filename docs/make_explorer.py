"""The picture of the explorer's page: python docs/make_explorer.py, with chromium installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import which

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SETTLED = "document.querySelectorAll('.loading').length === 0"


def main() -> None:
    photos = [str(ROOT / "examples" / "photos" / name) for name in ("church.jpg", "cat.jpg")]
    command = [sys.executable, "-m", "torchbcos", "serve", *photos, "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        browser = playwright.chromium.launch(
            executable_path=which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 800})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_selector("#sum:has-text('logit')")
        page.wait_for_function(SETTLED)
        box = page.locator("#image").bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + box["width"] * 0.33, box["y"] + box["height"] * 0.3)
        page.wait_for_selector("#units figure")
        page.wait_for_function(SETTLED)
        page.screenshot(path=ROOT / "docs" / "pictures" / "explorer.png")
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
