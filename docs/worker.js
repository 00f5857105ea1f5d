// Browsers start no Worker from the disk, and the search needs one: here its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget { // the name by which the search knows that it is in a frame
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.waiting = [];
      const place = new URL(url, location.href), inside = this.frame.contentWindow, page = this.frame.contentDocument;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = source => new Promise(loaded => {
        const script = page.createElement("script");
        script.src = new URL(source, place);
        script.onload = loaded;
        page.body.append(script);
      });
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(place).then(() => {
        this.loaded = true;
        for (const data of this.waiting) this.postMessage(data);
      });
    }

    postMessage(data) {
      if (!this.loaded) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() { this.frame.remove(); }
  };
  window.Worker = window.IFrameWorker;
}
