// Runs the page's modules in node on the cases of cases.json, and prints what they compute as JSON.

import { readFileSync } from "node:fs";
import { Answers } from "./answers.js";
import { plain } from "./numbers.js";
import { fit } from "./pixels.js";
import { simdKernel } from "./simd.js";
import { VisionTransformer } from "./vit.js";
import { Weights } from "./weights.js";

const { models, pictures, programs } = JSON.parse(readFileSync("cases.json"));
const PIECE = 2e4; // bytes: more than a header, less than a file
const plainly = (found) => Object.fromEntries(Object.entries(found).map(([name, { data }]) => [name, Array.from(data)]));

function modelOf({ file, options }, kernel) {
  const weights = new Weights(kernel);
  const bytes = readFileSync(file);
  for (let at = 0; at < bytes.length; at += PIECE) weights.add(bytes.subarray(at, at + PIECE).toString("base64"));
  return new VisionTransformer(options, weights, kernel);
}

const KERNELS = { plain: () => plain, simd: () => simdKernel(programs) };
const found = { models: {}, pictures: {}, kernels: [] };
for (const [name, kernelOf] of Object.entries(KERNELS)) {
  const kernel = kernelOf();
  found.kernels.push(kernel.name);
  for (const [model, given] of Object.entries(models)) {
    const vit = modelOf(given, kernel);
    const attention = [];
    const { logits } = await vit.forward(Float32Array.from(given.image), async (layer, head, A) => attention.push(...A));
    found.models[`${name} ${model}`] = { logits: Array.from(logits), attention };
  }
}

for (const [name, { rgba, width, height, framing }] of Object.entries(pictures)) {
  const read = (left, top, columns, rows) => {
    const lines = Array.from({ length: rows }, (_, row) => {
      const from = 4 * ((top + row) * width + left);
      return rgba.slice(from, from + 4 * columns);
    });
    return Uint8ClampedArray.from(lines.flat());
  };
  found.pictures[name] = Array.from(fit({ width, height, read }, framing));
}

for (const [name, { about, pixels, layer, target, off, ...given }] of Object.entries(models)) {
  if (!about) continue;
  const answers = new Answers(modelOf(given, simdKernel(programs)), about);
  const seen = Uint8Array.from(pixels);
  const step = async () => {};
  const without = await answers.explore(seen, { off }, step);
  const lens = await answers.heatmap(seen, { method: "lens", target, off }, step);
  const whole = await answers.explore(seen, {}, step);
  found.models[`answers ${name}`] = {
    whole: plainly(whole.tensors),
    without: plainly(without.tensors),
    lens: [lens, await answers.heatmap(seen, { method: "lens", target }, step)].map(({ tensors }) => plainly(tensors)),
    verdict: whole.verdict ?? null,
    layer: plainly((await answers.attention(seen, { layer }, step)).tensors),
    mean: plainly((await answers.attention(seen, { layer, head: "mean" }, step)).tensors),
    head: plainly((await answers.attention(seen, { layer, head: 1 }, step)).tensors),
    maps: Object.fromEntries(
      await Promise.all(
        Object.keys(about.methods ?? {}).map(async (method) => {
          const { tensors } = await answers.heatmap(seen, { method, target }, step);
          return [method, Array.from(tensors.heatmaps.data)];
        }),
      ),
    ),
  };
}
console.log(JSON.stringify(found));
