// The page's requests to the server. Addresses are relative, so that a proxy may use any path.

import { unpack } from "./pack.js";

/** A failed request: the server's error text, and the status. */
export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEPT = "vitascope token";
const PAUSE = 1000; // milliseconds between requests to a server that is not ready
let token = "";

/** Set the token to send; it is kept until this tab is closed. */
export function useToken(text) {
  token = text;
  try {
    sessionStorage.setItem(KEPT, text);
  } catch {
    // a browser without storage asks again after a reload
  }
}

/** Use the token in the address, `#token=...`, which is then removed, or else the one that this tab keeps. */
export function takeToken() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const given = parts.get("token");
  if (given) {
    parts.delete("token");
    history.replaceState(null, "", `${location.pathname}${location.search}${parts.size ? `#${parts}` : ""}`);
    useToken(given);
    return true;
  }
  try {
    token = sessionStorage.getItem(KEPT) ?? token;
  } catch {
    // as above
  }
  return false;
}

/** Repeat a request until the server is ready, and report its reason for each time that it is not. */
export async function whenReady(request, report, signal) {
  for (;;) {
    try {
      return await request();
    } catch (error) {
      if (error.status !== 503) throw error;
      report(error.message);
      await new Promise((resolve) => setTimeout(resolve, PAUSE));
      signal?.throwIfAborted();
    }
  }
}

/**
 * A picture's prediction and attention, or one layer's attention if `part` names one.
 *
 * Here and below, `source` is "" for the server's model, or the prefix of the addresses of the one beside it.
 */
export async function fetchAttention(picture, part = {}, signal = undefined, source = "") {
  return unpack(await (await post(`${source}v1/attention`, picture, part, signal)).arrayBuffer());
}

/** The map of a class: `part` is {method, target}. (A page without a server also reports the share that is done.) */
export async function fetchHeatmap(picture, part, signal = undefined, source = "") {
  return unpack(await (await post(`${source}v1/heatmap`, picture, part, signal)).arrayBuffer());
}

/** The model: its name, architecture and digest, its classes, the server's limits. */
export async function fetchModel(source = "") {
  return (await ask(`${source}v1/model`)).json();
}

/** The page's texts in Chinese by the English ones. */
export async function fetchTexts() {
  return (await ask("web/chinese.json")).json();
}

/** The names and titles of the samples. */
export async function fetchSamples() {
  return (await ask("v1/samples")).json();
}

/** A sample's encoded picture. */
export async function fetchSample(name) {
  return (await ask(`v1/samples/${encodeURIComponent(name)}`)).blob();
}

function post(path, picture, parameters, signal) {
  const given = Object.entries(parameters).filter(([, value]) => `${value}`); // an empty list is left out
  const query = new URLSearchParams(given).toString();
  return ask(query ? `${path}?${query}` : path, {
    method: "POST",
    body: picture,
    headers: { "Content-Type": picture.type || "application/octet-stream" },
    signal,
  });
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${utf8(token)}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new RequestError(response.status, await reason(response));
  return response;
}

/** A text as a header value: one character per byte of its UTF-8. */
function utf8(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

/** The reason for a failed request: the text in the server's JSON, or the status. */
async function reason(response) {
  const fallback = `The server answered ${response.status} ${response.statusText}.`;
  if (!(response.headers.get("Content-Type") ?? "").includes("json")) return fallback;
  const body = await response.json();
  const text = body.error ?? body.detail ?? body.message;
  return typeof text === "string" ? text : (text?.message ?? fallback);
}
