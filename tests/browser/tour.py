"""Tour a server's explorer page: take screenshots, and measure how fast it follows the pointer.

    vitascope serve runs/photos
    python -m tests.browser.tour http://127.0.0.1:8000 pictures/

Prints, for 100 moves of the pointer from patch to patch, the milliseconds from the event to the end of the
frame in which the map was drawn, measured in the page, and any errors.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from tests.browser import PHONE, Visit, visiting
from vitascope.deploy.page.browser import launched

# One listener before the page's own, on the window in the capturing phase. The page draws in the next
# animation frame; a message posted in that frame arrives after all of the frame's work.
TIMING = """async moves => {
    const canvas = document.querySelector("canvas.picture");
    const box = canvas.getBoundingClientRect();
    const channel = new MessageChannel();
    const times = [];
    for (let move = 0; move < moves; move++) {
        await new Promise(done => setTimeout(done, 30));
        const x = box.left + box.width * ((move * 0.37) % 1);
        const y = box.top + box.height * ((move * 0.61) % 1);
        times.push(await new Promise(done => {
            window.addEventListener("pointermove", () => {
                const begun = performance.now();
                requestAnimationFrame(() => {
                    channel.port1.onmessage = () => done(performance.now() - begun);
                    channel.port2.postMessage(0);
                });
            }, { capture: true, once: true });
            canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
        }));
    }
    return times;
}"""


AT = (0.45, 0.4)
"""The place in the picture that is pointed at, in fractions of its sides."""


def main(address: str, folder: str, layer: int | None = None, head: int | None = None) -> None:
    """Visit a server's page; the pictures, in a folder, show a layer and a head if they are given."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    with launched() as browser:
        with visiting(browser, address) as visit:
            visit.page.locator(".samples button").first.wait_for()
            visit.page.screenshot(path=out / "empty.png")
            visit.open_sample()
            times = sorted(visit.page.evaluate(TIMING, 100))
            print(f"{visit.text('#model')}: {len(times)} moves, milliseconds from pointer to drawn:")
            print(f"median {statistics.median(times):.1f}, 95% {times[94]:.1f}, most {times[-1]:.1f}")
        visits: dict[str, dict[str, Any]] = {
            "light": {"color_scheme": "light"},
            "dark": {"color_scheme": "dark"},
            "compare": {"color_scheme": "light"},
            "phone": {**PHONE, "color_scheme": "dark"},
        }
        for name, context in visits.items():
            with visiting(browser, address, **context) as visit:
                show(visit, name, layer, head)
                visit.page.screenshot(path=out / f"{name}.png")
                print(f"{name}: {visit.faults or 'no errors'}")


def show(visit: Visit, name: str, layer: int | None, head: int | None) -> None:
    visit.open_sample()
    if name == "compare":
        visit.page.click("#compare")
        visit.open_sample(1)
    if layer is not None:
        visit.press(*["["] * 100, *["]"] * layer)
    visit.press(*["."] * (0 if head is None else head + 1))
    if name == "phone":
        box = visit.page.locator("canvas.picture").bounding_box()
        visit.page.touchscreen.tap(box["x"] + AT[0] * box["width"], box["y"] + AT[1] * box["height"])
        visit.settle()
    else:
        visit.hover(*AT)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
