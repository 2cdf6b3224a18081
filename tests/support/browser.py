"""Pages as Chromium lays them out: what is cut, small or overlapping at a width, and screenshots."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars")
SMALLEST = 11  # pixels of a text

# Pages are laid out in frames: a window of Chromium is never as narrow as a phone.
SCRIPT = """
const measured = (frame) => {
  const page = frame.contentDocument, root = page.documentElement, width = frame.clientWidth;
  const named = (item) => item.tagName + "." + item.className + ": " + item.textContent.trim().slice(0, 40);
  const all = [...page.querySelectorAll("body *")].filter((item) => !item.closest("script"));
  const hasText = (item) => [...item.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const texts = all.filter(hasText);
  const seen = texts.filter((item) => item.checkVisibility() && item.tagName !== "title");
  const wide = (item) => item.scrollWidth > item.clientWidth + 1 && item.clientWidth > 0 && !item.closest("svg, .xs");
  const out = (item) => item.getBoundingClientRect().right > width + 1 || item.getBoundingClientRect().left < -1;
  const within = (one, other) => one.left < other.right && one.top < other.bottom;
  const meet = (one, other) => within(one, other) && within(other, one);
  const overlaps = [];
  page.querySelectorAll(".chart").forEach((chart) => {
    const items = [chart.querySelector(".plot"), ...chart.querySelectorAll("span")].filter((item) => item.checkVisibility());
    items.forEach((item, i) => items.slice(i + 1).forEach((other) => {
      const [one, two] = [item, other].map((each) => each.getBoundingClientRect());
      if (meet(one, two)) overlaps.push([item, other].map(named).join(" and "));
    }));
  });
  const small = seen.filter((item) => parseFloat(page.defaultView.getComputedStyle(item).fontSize) < SMALLEST);
  return {
    width: root.scrollWidth, height: root.scrollHeight, cut: [...all.filter(wide), ...seen.filter(out)].map(named), overlaps,
    small: small.map(named), texts: seen.length, background: page.defaultView.getComputedStyle(page.body).backgroundColor,
  };
};
onload = () => {
  document.querySelector("pre").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measured));
};
""".replace("SMALLEST", str(SMALLEST))


def laid_out(text: str, widths: Sequence[int], folder: Path, dark: bool = False) -> list[dict[str, Any]]:
    """Lay out a page with all its details open; return for each width its `height`, and what is `cut`, `small`, or `overlaps`."""
    page = html.escape(text.replace("<details", "<details open"))
    frames = "".join(f'<iframe style="width: {width}px; height: 900px; border: 0" srcdoc="{page}"></iframe>' for width in widths)
    (folder / "frames.html").write_text(f"<!DOCTYPE html>{frames}<pre></pre><script>{SCRIPT}</script>")
    printed = _chromium(folder, dark, "--window-size=1800,1000", "--dump-dom", (folder / "frames.html").as_uri())
    found = re.search(r"<pre>(\[.*?)</pre>", printed, re.DOTALL)
    assert found is not None, printed[-1000:]
    layouts: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return layouts


def screenshot(text: str, path: Path, width: int, height: int, folder: Path, dark: bool = False) -> None:
    """Write the top of a page as a picture."""
    (folder / "page.html").write_text(text)
    _chromium(folder, dark, f"--window-size={width},{height}", f"--screenshot={path}", (folder / "page.html").as_uri())


def _chromium(folder: Path, dark: bool, *arguments: str) -> str:
    assert CHROMIUM is not None
    profile, scheme = f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    run = subprocess.run([CHROMIUM, *FLAGS, profile, scheme, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return run.stdout
