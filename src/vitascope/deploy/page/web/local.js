// In place of server.js, in a page that holds the model itself: the same functions, answered by worker.js.

import { decoded } from "./decoding.js";
import { threadHere } from "./worker.js";

const model = JSON.parse(document.getElementById("model-data").textContent);
document.getElementById("arriving").remove();
const pending = new Map(); // id -> {resolve, reject, report}
const pixels = new WeakMap(); // picture -> the promise of the model's pixels
const reports = []; // of those that wait for a request to begin
let thread = null;
let started = null; // the promise of the model
let numbers = 0;

/** The thread's message function: a worker's or, where the browser gives none, the page's own. */
async function openThread() {
  try {
    const program = document.getElementById("model-program").textContent;
    const worker = new Worker(URL.createObjectURL(new Blob([program], { type: "text/javascript" })));
    await new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => {
        if (data.ready) return resolve();
        worker.terminate();
        reject(new Error("a worker that cannot read pixels"));
      };
      worker.onerror = (event) => reject(new Error(event.message));
    });
    worker.onmessage = ({ data }) => receive(data);
    return { send: (message, handed) => worker.postMessage(message, handed), where: "" };
  } catch {
    return { send: threadHere(receive), where: ", in the page itself, because this browser gives it no worker" };
  }
}

function receive({ id, share, result, error }) {
  const request = pending.get(id);
  if (share !== undefined) {
    request.report(share);
    return;
  }
  pending.delete(id);
  if (error === undefined) request.resolve(result);
  else request.reject(new RequestError(422, error));
}

/** Ask the thread; `signal` ends the request, and what is `handed` to the thread leaves the page. */
function ask(message, signal, report = () => {}, handed = []) {
  const id = numbers++;
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    signal?.addEventListener("abort", () => {
      thread.send({ id, do: "abort" });
      reject(signal.reason);
    });
    pending.set(id, { resolve, reject, report });
    thread.send({ id, ...message }, handed);
  });
}

/** Hand the weights to the thread, piece by piece; each piece leaves the page's memory. */
async function start(report) {
  thread = await openThread();
  const { options, about, kernel } = model;
  thread.kernel = await ask({ do: "begin", options, about, kernel });
  const pieces = document.querySelectorAll("script[type='text/base64']").length;
  const next = () => document.querySelector("script[type='text/base64']"); // a list of them would keep them all
  for (let [piece, place] = [next(), 0]; piece; [piece, place] = [next(), place + 1]) {
    report(`unpacking the model, ${Math.round((100 * place) / pieces)}%`);
    await ask({ do: "piece", base64: piece.textContent });
    piece.remove();
  }
  about.model = `${computing()}, ${about.model}`;
}

/** What computes, once the model is unpacked. */
export function computing() {
  return `${thread.kernel} in this browser${thread.where}`;
}

/** A failed request, with a status as the server's have. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** There are no tokens here. */
export function useToken() {}

/** As above. */
export function takeToken() {
  return false;
}

/** Run a request, and report what it is doing. */
export async function whenReady(request, report) {
  reports.push(report);
  try {
    return await request();
  } finally {
    reports.splice(reports.indexOf(report), 1);
  }
}

function tell(reason) {
  for (const report of reports) report(reason);
}

/** The model's pixels of a picture, computed once. */
function pixelsOf(picture) {
  if (!pixels.has(picture)) {
    pixels.set(picture, seen(picture));
    pixels.get(picture).catch(() => pixels.delete(picture)); // so that `Try again` does
  }
  return pixels.get(picture);
}

async function seen(picture) {
  const bitmap = await decoded(picture, model.about.framing);
  return ask({ do: "pixels", bitmap }, undefined, undefined, [bitmap]);
}

/** A picture's prediction and attention, or one layer's attention if `part` names one. */
export async function fetchAttention(picture, part = {}, signal) {
  await fetchModel();
  const isWhole = part.layer === undefined;
  const given = { pixels: await pixelsOf(picture), part };
  const found = await ask({ do: isWhole ? "explore" : "attention", ...given }, signal, (share) => {
    if (isWhole) tell(`the model is looking, ${Math.round(100 * share)}%`);
  });
  return isWhole ? { ...found, about: model.about } : found;
}

/** The map of a class: `part` is {method, target}; `report` gets the share that is done. */
export async function fetchHeatmap(picture, part, signal, source, report) {
  return ask({ do: "heatmap", pixels: await pixelsOf(picture), part }, signal, report);
}

/** The model: its name, architecture and digest. */
export async function fetchModel() {
  started ??= start(tell);
  await started;
  return model.described;
}

/** The names and titles of the samples. */
export async function fetchSamples() {
  return model.samples;
}

/** A sample's encoded picture. */
export async function fetchSample(name) {
  const { base64, type } = model.samples.find((sample) => sample.name === name);
  return new Blob([Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0))], { type });
}
