// The thread that holds the model. It also runs in the page itself where a browser has no such threads.
//
// Messages in: {id, do, ...}, where `do` is a method of `Thread`; {id, do: "abort"} ends a request.
// Messages out: {id, share} while it computes, then {id, result} or {id, error}.

import { Answers } from "./answers.js";
import { bestKernel } from "./kernels.js";
import { VisionTransformer } from "./vit.js";
import { Pieces, Weights } from "./weights.js";

class Thread {
  constructor(post) {
    this.post = post;
    this.aborted = new Set();
    this.last = Promise.resolve(); // requests are answered one after another
  }

  receive({ id, do: name, ...given }) {
    if (name === "abort") {
      this.aborted.add(id);
      return;
    }
    this.last = this.last.then(async () => {
      try {
        if (this.aborted.has(id)) throw new Error("aborted");
        this.post({ id, result: await this[name](given, (share) => this.step(id, share)) });
      } catch (error) {
        this.post({ id, error: error.message });
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

  begin({ size }) {
    this.pieces = new Pieces(size);
  }

  piece({ base64 }) {
    this.pieces.add(base64);
  }

  async build({ options, about, kernel }) {
    this.kernel = await bestKernel(kernel, options.largest_product);
    const weights = new Weights(this.pieces.bytes.buffer, this.kernel);
    this.pieces = null;
    this.answers = new Answers(new VisionTransformer(options, weights, this.kernel), about);
    return this.kernel.name;
  }

  pixels({ bitmap }) {
    return this.answers.pixels(bitmap);
  }

  explore({ pixels }, step) {
    return this.answers.explore(pixels, step);
  }

  attention({ pixels, part }, step) {
    return this.answers.attention(pixels, part, step);
  }

  heatmap({ pixels, part }, step) {
    return this.answers.heatmap(pixels, part, step);
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

/** A function that takes messages to a thread in the page itself; `post` gets its answers. */
export function threadHere(post) {
  const thread = new Thread(post);
  return (message) => thread.receive(message);
}

if (typeof document === "undefined") {
  const receive = threadHere((message) => postMessage(message));
  onmessage = ({ data }) => receive(data);
  postMessage({ ready: true });
}
