// What a page that learns keeps in the browser (IndexedDB): pictures as features and thumbnails, and every decision.
//
// What is written together is kept together or not at all, whenever the tab or the browser ends.

const STORES = ["pictures", "thumbnails", "log"]; // lists: their keys are the numbers from 0

export class Storage {
  /** Open the storage of a name, for one tab at a time. */
  async open(name) {
    await claimed(name);
    const request = indexedDB.open(name);
    request.onupgradeneeded = () => STORES.forEach((store) => request.result.createObjectStore(store));
    this.database = await answerOf(request).catch((error) => {
      throw new Error(`This browser keeps nothing for this page (${error.message}): open it in another one, or not in a private window.`);
    });
    navigator.storage?.persist?.().catch(() => false); // else it may be deleted where the disk gets full; a user may be asked
  }

  /** All entries of a list. */
  all(store) {
    return answerOf(this.database.transaction(store).objectStore(store).getAll());
  }

  thumbnail(id) {
    return answerOf(this.database.transaction("thumbnails").objectStore("thumbnails").get(id));
  }

  /** Append a picture, whose number is `id`, with its thumbnail, an ArrayBuffer. */
  addPicture(id, picture, thumbnail) {
    return this.write(["pictures", "thumbnails"], "relaxed", (pictures, thumbnails) => {
      pictures.add(picture, id);
      thumbnails.add(thumbnail, id);
    });
  }

  /** Change the log, and wait until it is on the disk. */
  writeLog(change) {
    return this.write(["log"], "strict", change);
  }

  write(names, durability, change) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(names, "readwrite", { durability });
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(reasonOf(transaction.error));
      change(...names.map((name) => transaction.objectStore(name)));
    });
  }
}

/** Wait until this tab alone has a name, until it is closed. */
function claimed(name) {
  return new Promise((resolve, reject) => {
    const held = navigator.locks.request(name, { ifAvailable: true }, (lock) => {
      if (!lock) throw new Error("These pictures are open in another tab: go on there, or close it and reload this one.");
      resolve();
      return new Promise(() => {});
    });
    held.catch(reject);
  });
}

function answerOf(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function reasonOf(error) {
  if (error?.name !== "QuotaExceededError") return error ?? new Error("The browser did not save it: try again.");
  return new Error("This browser's storage is full, and nothing of this was saved; all before is kept. Free disk space, then try again.");
}
