// Files of what was learned: a page that only answers, and a model for vitascope.
//
// A classifier is {names, weight (K, D), bias (K)}. `page` is what page.py has written for pages that learn.

import { header } from "./pack.js";
import { pageData } from "./server.js";

const PIECE = 3 << 20; // bytes of weights in one element, as in document.py
const LARGEST_BIAS = 1e4; // as in training/linear/head.py

/** The explorer with the body and its new head: a Blob of HTML. */
export async function pageFile(classifier) {
  const { explorer, answering } = pageData.learning;
  const { options, about, described } = answering;
  const weights = new Uint8Array(await safetensors([...bodyTensors(), ...headTensors(classifier)]).arrayBuffer());
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", weights));
  const digest = Array.from(hash, (byte) => byte.toString(16).padStart(2, "0")).join("");
  const model = { options, described: { ...described, digest }, about: { ...about, class_names: classifier.names } };
  const data = { ...pageData, models: [model], learning: undefined, texts: explorer.texts };
  const script = (attributes, text) => `<script ${attributes}>${text}<\/script>\n`;
  const parts = [explorer.begin, script('type="application/json" id="model-data"', JSON.stringify(data).replaceAll("<", "\\u003c"))];
  for (let from = 0; from < weights.length; from += PIECE) {
    parts.push(script('type="text/base64" data-model="0"', base64Of(weights.subarray(from, from + PIECE))));
  }
  parts.push(script('id="model-program"', document.getElementById("model-program").textContent));
  return new Blob([...parts, script('id="explorer-program"', explorer.program), explorer.end]);
}

/** A safetensors file that has its configuration: a Blob. */
export function modelFile(classifier) {
  const { shapes, config, preprocessor } = pageData.learning.model;
  const names = { class_names: classifier.names, num_classes: classifier.names.length };
  const settings = JSON.stringify({ config: { ...config, ...names }, preprocessor });
  const packed = Object.fromEntries(bodyTensors().map((tensor) => [tensor.name, tensor]));
  const body = Object.entries(shapes).map(([name, shape]) => unpacked(packed[name], shape, packed[`${name}.scales`]));
  return safetensors([...body, ...headTensors(classifier)], { vitascope: settings });
}

/** A tensor as a model has it, by its shape: of int8 and scales float32; without the biases of keys if it has fewer numbers. */
function unpacked({ name, dtype, data }, shape, scales) {
  if (scales) {
    const [levels, factors] = [new Int8Array(data.slice().buffer), new Float32Array(scales.data.slice().buffer)];
    const width = levels.length / factors.length;
    return { name, dtype: "F32", shape, data: Float32Array.from(levels, (level, at) => level * factors[Math.floor(at / width)]) };
  }
  const bytes = shape.reduce((product, size) => product * size, dtype === "F16" ? 2 : 4);
  if (bytes === data.length) return { name, dtype, shape, data };
  return { name, dtype, shape, data: new Blob([data.slice(0, bytes / 2), data.slice(-bytes / 2)]) };
}

/** The tensors in the document: [{name, dtype, shape, data}], data as bytes. */
function bodyTensors() {
  const pieces = [...document.querySelectorAll("script[type='text/base64']")].map((piece) => atob(piece.textContent));
  const bytes = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) for (let i = 0; i < piece.length; i++) bytes[at++] = piece.charCodeAt(i);
  const { entries, length } = header(bytes.buffer);
  delete entries.__metadata__;
  const inOrder = Object.entries(entries).sort(([, a], [, b]) => a.data_offsets[0] - b.data_offsets[0]);
  return inOrder.map(([name, { dtype, shape, data_offsets }]) => {
    const [begin, end] = data_offsets.map((offset) => 8 + length + offset);
    return { name, dtype, shape, data: bytes.subarray(begin, end) };
  });
}

/** The layers of a head, one or, for the two tokens of a distilled body whose logits are averaged, two. */
function headTensors({ names, weight, bias }) {
  const [K, layers] = [names.length, pageData.learning.heads];
  const [D, width] = [weight.length / K, weight.length / K / layers.length];
  const biases = Float32Array.from(bias, (value) => Math.max(-LARGEST_BIAS, Math.min(LARGEST_BIAS, value)));
  return layers.flatMap((name, part) => {
    const own = Float32Array.from({ length: K * width }, (_, at) => layers.length * weight[Math.floor(at / width) * D + part * width + (at % width)]);
    const head = { name: `${name}.weight`, dtype: "F32", shape: [K, width], data: own };
    return [head, { name: `${name}.bias`, dtype: "F32", shape: [K], data: biases }];
  });
}

/** A safetensors file of tensors, as a Blob. */
function safetensors(tensors, metadata = {}) {
  const entries = { __metadata__: { format: "pt", ...metadata } };
  let at = 0;
  for (const { name, dtype, shape, data } of tensors) {
    const end = at + (data.byteLength ?? data.size);
    entries[name] = { dtype, shape, data_offsets: [at, end] };
    at = end;
  }
  const text = new TextEncoder().encode(JSON.stringify(entries));
  const padding = new Uint8Array(-text.length & 7).fill(32);
  const size = new DataView(new ArrayBuffer(8));
  size.setBigUint64(0, BigInt(text.length + padding.length), true);
  return new Blob([size, text, padding, ...tensors.map(({ data }) => data)]);
}

function base64Of(bytes) {
  let letters = "";
  for (let from = 0; from < bytes.length; from += 8192) letters += String.fromCharCode(...bytes.subarray(from, from + 8192));
  return btoa(letters);
}
