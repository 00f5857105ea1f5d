"""Tour a server's explorer page: take screenshots, and measure how fast it follows the pointer.

    vitascope serve runs/photos
    python -m tests.browser.tour http://127.0.0.1:8000 --out pictures/

Prints, for moves of the pointer from patch to patch, the milliseconds from the event to the end of the frame
in which the map was drawn, measured in the page, and any errors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.browser import Visit, visiting
from vitascope.deploy.page.browser import launched

PHONE = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}

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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("address", help="of the server")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--moves", type=int, default=100, help="of the pointer")
    parser.add_argument("--layer", type=int, help="layer that the pictures show")
    parser.add_argument("--head", type=int, help="head that the pictures show")
    parser.add_argument("--at", type=float, nargs=2, default=(0.45, 0.4), help="place in the picture, shares")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)

    with launched() as browser:
        with visiting(browser, arguments.address) as visit:
            visit.page.locator(".samples button").first.wait_for()
            visit.page.screenshot(path=arguments.out / "empty.png")
            visit.open_sample()
            times = sorted(visit.page.evaluate(TIMING, arguments.moves))
            print(f"{visit.text('#model')}: {len(times)} moves, milliseconds from pointer to drawn:")
            nearly_all = times[int(0.95 * len(times))]
            print(f"median {statistics.median(times):.1f}, 95% {nearly_all:.1f}, most {times[-1]:.1f}")
        visits: dict[str, dict[str, Any]] = {
            "light": {"color_scheme": "light"},
            "dark": {"color_scheme": "dark"},
            "compare": {"color_scheme": "light"},
            "phone": {**PHONE, "color_scheme": "dark"},
        }
        for name, context in visits.items():
            with visiting(browser, arguments.address, **context) as visit:
                _show(visit, name, arguments)
                visit.page.screenshot(path=arguments.out / f"{name}.png")
                print(f"{name}: {visit.faults or 'no errors'}")


def _show(visit: Visit, name: str, arguments: Any) -> None:
    visit.open_sample()
    if name == "compare":
        visit.page.click("#compare")
        visit.open_sample(1)
    for _ in range(100 if arguments.layer is not None else 0):
        visit.press("[")
    visit.press(*["]"] * (arguments.layer or 0))
    visit.press(*["."] * (0 if arguments.head is None else arguments.head + 1))
    if name == "phone":
        box = visit.page.locator("canvas.picture").bounding_box()
        visit.page.touchscreen.tap(
            box["x"] + arguments.at[0] * box["width"], box["y"] + arguments.at[1] * box["height"]
        )
        visit.settle()
    else:
        visit.hover(*arguments.at)


if __name__ == "__main__":
    main()
