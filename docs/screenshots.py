"""
The pictures of the site: a plan's report and the monitor's page, made by memplan and drawn by a real browser.

`make screenshots` writes them anew into docs/images. It needs Chromium: one that is installed (`apt install chromium`), or that of
Playwright. The report is of a rehearsed plan; the monitor watches a simulated machine on which a training keeps more memory in every step.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from memplan.errors import MissingError
from memplan.hardware.torch_install import find_torch
from tests.hardware.nvml_driver import build_driver
from tests.standin.machine import machine

REPOSITORY = Path(__file__).parents[1]
TREES = REPOSITORY / "tests" / "trees"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH = 940
"""What the pages are made for, in pixels."""

PLAN = (
    "--gpu", "t4", "--target-effective-batch", "256", "--curves", "--field", "micro_batch_size=config.yaml:data.batch_size",
    "--field", "gradient_accumulation_steps=config.yaml:trainer.accumulate",
)  # fmt: skip

TRAINING = """
import time
from steps import keeping

step = keeping("cuda")
step()
print("trains", flush=True)
while True:
    step()
    time.sleep(1)
"""


def find_browser() -> str:
    """Return the path of a Chromium. Raises MissingError where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None) or _of_playwright()
    if found is None:
        raise MissingError(
            "no Chromium on this machine", hint="apt install chromium; or pip install playwright, playwright install chromium"
        )
    return found


def _of_playwright() -> str | None:
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def draw(page: Path, picture: Path, *, height: int) -> None:
    """Draw the first *height* pixels of the HTML file *page* as a PNG."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                find_browser(), "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium's sandbox does not run as root
                f"--window-size={WIDTH},{height}", f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def memplan(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command of memplan."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | (environment or {})
    subprocess.run([sys.executable, "-m", "memplan", *arguments], cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL)


def draw_report(folder: Path, picture: Path) -> None:
    """Draw the report of a rehearsed plan."""
    project = shutil.copytree(TREES / "own_program", folder / "own_program")
    memplan(*PLAN, "--report", "plan.html", "--", "train.py", "config.yaml", cwd=project)
    draw(project / "plan.html", picture, height=1600)


def draw_monitor(folder: Path, picture: Path, *, samples: int = 60) -> None:
    """Draw the page of a monitor that watched a training."""
    (folder / "driver").mkdir()
    here = machine(find_torch(), build_driver(folder / "driver"), "t4", utilization=87)
    environment = os.environ | here | {"PYTHONDONTWRITEBYTECODE": "1"}
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING], cwd=TREES / "symptoms", env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert training.stdout is not None
        assert training.stdout.readline() == "trains\n"
        memplan("monitor", "--samples", str(samples), "--interval", "0.25", "--plot", "run.html", cwd=folder, environment=here)
    finally:
        training.kill()
        training.communicate()
    draw(folder / "run.html", picture, height=720)


def main() -> None:
    """Write the pictures into the folder that is named, or into that of the site."""
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs" / "images"
    pictures.mkdir(exist_ok=True)
    find_browser()
    with tempfile.TemporaryDirectory() as folder:
        draw_report(Path(folder), pictures / "report.png")
        draw_monitor(Path(folder), pictures / "monitor.png")


if __name__ == "__main__":
    main()
