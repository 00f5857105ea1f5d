// What this page has beside labelling: ways to add pictures, and files of what was learned.

import { at, make } from "./elements.js";

/**
 * Draw the buttons, and take what is dropped and pasted.
 *
 * @param engine {add(files, first), cancel(), exported(kind)}: `first` is called when there are pictures to label.
 */
export function offerTools({ attempt, add, cancel, exported }) {
  const show = () => document.querySelector("[data-view=next]").click();
  const stop = button("Stop adding", cancel);
  const pick = (properties) => make("input", { type: "file", multiple: true, ...properties });
  const [pictures, folder] = [pick({ accept: "image/*" }), pick({ webkitdirectory: true })];

  const addAll = (some) =>
    attempt(async () => {
      const chosen = [...(await some)];
      if (!chosen.length) return;
      stop.hidden = false;
      await add(chosen, show).finally(() => (stop.hidden = true));
    });

  stop.hidden = true;
  for (const input of [pictures, folder]) {
    input.hidden = true;
    input.addEventListener("change", () => {
      addAll([...input.files]);
      input.value = "";
    });
  }
  at("tools").prepend(
    ...[stop, button("Add pictures", () => pictures.click()), button("Add a folder", () => folder.click())],
    ...[button("Camera", () => attempt(() => openCamera(addAll))), pictures, folder],
  );
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    addAll(filesOf([...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean)));
  });
  document.addEventListener("paste", (event) => addAll(event.clipboardData.files));
  at("nothing").textContent = "Drop pictures or a folder here, paste them, or add them with the buttons above.";
  at("command").hidden = true; // the files are here instead
  at("end").querySelector("h2").textContent = "Save what was learned";
  at("outputs").append(
    button("Save a page that answers", () => attempt(async () => save("classifier.html", await exported("page")))),
    button("Save the model", () => attempt(async () => save("classifier.safetensors", await exported("run")))),
  );
}

function button(text, act) {
  const found = make("button", { type: "button" }, text);
  found.addEventListener("click", act);
  return found;
}

function save(name, content) {
  const link = make("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // once it is saved
}

/** The files of what was dropped, with those in its folders. */
async function filesOf(entries) {
  const found = [];
  for (const entry of entries) {
    if (entry.isFile) found.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
    else {
      const reader = entry.createReader();
      const some = () => new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100
      for (let next = await some(); next.length; next = await some()) found.push(...(await filesOf(next)));
    }
  }
  return found;
}

/** Show what the camera sees; each click on `Take` adds a picture, until it is closed. */
async function openCamera(addAll) {
  const stream = await navigator.mediaDevices.getUserMedia({ video: true });
  const video = make("video", { srcObject: stream, autoplay: true, muted: true, playsInline: true, width: 480 });
  const dialog = make("dialog", { ariaLabel: "Camera" }, video);
  const take = async () => {
    const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
    return [new File([blob], `camera ${new Date().toISOString()}.jpg`, { type: blob.type })];
  };
  dialog.append(make("p", {}, button("Take a picture", () => addAll(take())), " ", button("Close", () => dialog.close())));
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
