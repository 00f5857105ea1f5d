// The scale of heat: lightness rises evenly from night to noon, in OKLCH (Ottosson 2020), so that equal
// steps look equal, also in print and to the colour-blind.

const STEPS = 256;

/** RGB (256 * 3) of the scale, darkest first. */
export const RAMP = ramp();

/** The CSS colour of a value in [0, 1]. */
export function css(value) {
  const place = 3 * Math.round(255 * Math.min(1, Math.max(0, value)));
  return `rgb(${RAMP[place]} ${RAMP[place + 1]} ${RAMP[place + 2]})`;
}

/** A map, its cells from `least` to `most` or its own colours, as ImageData (h, w) with an opacity. */
export function heatImage({ cells, colours, least, most }, [h, w], strength) {
  const image = new ImageData(w, h);
  for (let cell = 0; colours && cell < h * w; cell++) {
    image.data.set([...colours.subarray(3 * cell, 3 * cell + 3), 255 * strength], 4 * cell);
  }
  const scale = most > least ? 1 / (most - least) : 0;
  for (let cell = 0; cells && cell < cells.length; cell++) {
    const value = Math.min(1, Math.max(0, (cells[cell] - least) * scale));
    const place = 3 * Math.round(255 * value);
    image.data.set(RAMP.subarray(place, place + 3), 4 * cell);
    image.data[4 * cell + 3] = 255 * strength * (0.62 + 0.38 * value); // places without attention become dark
  }
  return image;
}

function ramp() {
  const colours = new Uint8ClampedArray(3 * STEPS);
  for (let step = 0; step < STEPS; step++) {
    const t = step / (STEPS - 1);
    const lightness = 0.14 + 0.8 * t;
    const hue = (285 + 180 * t) * (Math.PI / 180); // violet, red, orange, yellow
    const chroma = 0.05 + 0.135 * Math.sin(Math.PI * Math.min(t / 0.98, 1) ** 0.85) + 0.09 * t;
    colours.set(toRgb(lightness, chroma * Math.cos(hue), chroma * Math.sin(hue)), 3 * step);
  }
  return colours;
}

/** OKLab to sRGB bytes. */
function toRgb(L, a, b) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((value) => {
    const cut = Math.min(1, Math.max(0, value));
    return 255 * (cut <= 0.0031308 ? 12.92 * cut : 1.055 * cut ** (1 / 2.4) - 0.055);
  });
}
