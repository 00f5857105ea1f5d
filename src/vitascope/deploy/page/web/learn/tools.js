// What this page has beside labelling: ways to add pictures, and files of what was learned.

import { at, make } from "./elements.js";

/** Draw the buttons, and take what is dropped and pasted; the functions are those of the engine. */
export function offerTools({ attempt, add, cancel, exported }) {
  const stop = Object.assign(button("Stop adding", cancel), { hidden: true });
  const addAll = (some) =>
    attempt(async () => {
      stop.hidden = false;
      await add(await some, () => document.querySelector("[data-view=next]").click()).finally(() => (stop.hidden = true));
    });
  const pick = (properties) => {
    const input = make("input", { type: "file", multiple: true, hidden: true, ...properties });
    input.addEventListener("change", () => addAll([...input.files]).then(() => (input.value = "")));
    return input;
  };
  const [pictures, folder] = [pick({ accept: "image/*" }), pick({ webkitdirectory: true })];
  at("tools").prepend(
    ...[stop, button("Add pictures", () => pictures.click()), button("Folder", () => folder.click())],
    ...[button("Camera", () => attempt(() => openCamera(addAll))), pictures, folder],
  );
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    const items = [...event.dataTransfer.items].filter(({ kind }) => kind === "file");
    addAll(filesOf(items.map((item) => item.webkitGetAsEntry() ?? item.getAsFile())));
  });
  document.addEventListener("paste", (event) => event.clipboardData.files.length && addAll([...event.clipboardData.files]));
  document.querySelector("[data-shown='no pictures']").textContent = "Drop pictures or a folder here, paste them, or add them with the buttons above.";
  at("end").querySelector("h2").textContent = "Save what was learned";
  at("outputs").append(
    button("Save a page that answers", () => attempt(async () => save("classifier.html", await exported("page")))),
    button("Save the model", () => attempt(async () => save("classifier.safetensors", await exported("run")))),
  );
}

const button = (text, onclick) => make("button", { type: "button", onclick }, text);

function save(name, content) {
  const link = make("a", { href: URL.createObjectURL(content), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // once it is saved
}

/** The files of what was dropped, with those in its folders. */
async function filesOf(entries) {
  const found = [];
  for (const entry of entries) {
    const reader = entry.isDirectory && entry.createReader();
    const some = () => new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100
    if (entry instanceof File) found.push(entry);
    else if (!reader) found.push(await new Promise((resolve, reject) => entry.file(resolve, reject)));
    else for (let next = await some(); next.length; next = await some()) found.push(...(await filesOf(next)));
  }
  return found;
}

/** Show what the camera sees; each click on `Take a picture` adds one, until it is closed. */
async function openCamera(addAll) {
  const stream = await navigator.mediaDevices.getUserMedia({ video: true });
  const video = make("video", { srcObject: stream, autoplay: true, muted: true, playsInline: true, width: 320 });
  const take = async () => {
    const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
    return [new File([blob], `camera ${new Date().toISOString()}.jpg`)];
  };
  const buttons = make("p", {}, button("Take a picture", () => addAll(take())), " ", button("Close", () => dialog.close()));
  const dialog = make("dialog", { ariaLabel: "Camera" }, video, buttons);
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
