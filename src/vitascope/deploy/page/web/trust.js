// What a calibrated model knows about an answer, as in model/trust.py.

/** The share of validation images that are less like the training images than features y (D). */
export function familiarityOf({ weights, kernel }, y) {
  const [center, means, levels, steps, [images]] = ["center", "means", "levels", "steps", "images"].map((name) =>
    weights.vector(`trust.${name}`),
  );
  const z = kernel.product(y.map((value, i) => value - center[i]), 1, weights.matrix("trust.projection.weight")); // (r)
  let nearest = Infinity;
  for (let from = 0; from < means.length; from += z.length) {
    const distance = z.reduce((sum, value, i) => sum + (value - means[from + i]) ** 2, 0);
    nearest = Math.min(nearest, distance);
  }
  const passed = steps.reduce((sum, step, i) => sum + Math.min(1, Math.max(0, (levels[i] - nearest) / step)), 0);
  return (1 + (images * passed) / steps.length) / (images + 1);
}

/** The classes that belong to the set, the most probable first, by the limit of the mass before a class, one or (K). */
export function setOf(probabilities, limit) {
  const order = Array.from(probabilities.keys()).sort((a, b) => probabilities[b] - probabilities[a]);
  let before = 0;
  return order.filter((k) => {
    const belongs = before <= (Array.isArray(limit) ? limit[k] : limit);
    before += probabilities[k];
    return belongs;
  });
}
