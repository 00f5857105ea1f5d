// The thread that holds the model. It also runs in the page itself where a browser has no such threads.
//
// Messages in: {id, do, ...}, where `do` is a method of `Thread`; {id, do: "abort"} ends a request.
// Messages out: {id, share} while it computes, then {id, result} or {id, error}.

import { Answers } from "./answers.js";
import { plain } from "./numbers.js";
import { simdKernel } from "./simd.js";
import { VisionTransformer } from "./vit.js";
import { Weights } from "./weights.js";

/** Requests that other modules answer, by name: functions of what is given. */
export const tasks = {};

class Thread {
  aborted = new Set();
  last = Promise.resolve(); // requests are answered one after another

  constructor(post) {
    this.post = post;
  }

  receive({ id, do: name, ...given }) {
    if (name === "abort") return this.aborted.add(id);
    this.last = this.last.then(async () => {
      try {
        if (this.aborted.has(id)) throw new Error("aborted");
        const answer = tasks[name] ?? this[name].bind(this);
        const result = await answer(given, (share) => this.step(id, share));
        this.post({ id, result }, buffersOf(result?.tensors));
      } catch (error) {
        this.post({ id, error: reasonOf(error) });
      } finally {
        this.aborted.delete(id);
      }
    });
  }

  /** Report the share of a request that is done, and let messages in between. */
  async step(id, share) {
    this.post({ id, share });
    await nextTask();
    if (this.aborted.has(id)) throw new Error("aborted");
  }

  // What a request can ask for

  begin({ options, about, programs }) {
    const kernel = simdKernel(programs) ?? plain;
    this.weights = new Weights(kernel);
    this.answers = new Answers(new VisionTransformer(options, this.weights, kernel), about);
    return kernel.name;
  }

  piece({ base64 }) {
    this.weights.add(base64);
  }

  pixels({ bitmap }) {
    return this.answers.pixels(bitmap);
  }

  answer({ what, pixels, part }, step) {
    return this.answers[what](pixels, part, step);
  }
}

const channel = new MessageChannel();
const waiting = [];
channel.port1.onmessage = () => waiting.shift()();

/** Wait until other messages have been received. */
function nextTask() {
  return new Promise((resolve) => {
    waiting.push(resolve);
    channel.port2.postMessage(0);
  });
}

/** An error as a reader may understand it: a RangeError is what browsers throw for memory that they do not have. */
function reasonOf(error) {
  if (!(error instanceof RangeError)) return error.message;
  return `this browser has too little memory for it (${error.message}): close other pages, then reload this one`;
}

/** The buffers of an answer, which are handed over and not copied. */
function buffersOf(tensors = {}) {
  return [...new Set(Object.values(tensors).map(({ data }) => data.buffer))];
}

/** A function that takes messages to a thread in the page itself; `post` gets its answers. */
export function threadHere(post) {
  const thread = new Thread(post);
  return (message) => thread.receive(message);
}

if (typeof document === "undefined") {
  const receive = threadHere((message, transferred) => postMessage(message, transferred));
  onmessage = ({ data }) => receive(data);
  postMessage({ ready: typeof OffscreenCanvas !== "undefined" }); // without it, a worker cannot read pixels
}
