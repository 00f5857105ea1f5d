// What a page that learns keeps in the browser (IndexedDB): pictures as features and thumbnails, and every decision.
//
// What is written together is kept together or not at all, whenever the tab or the browser ends.

const STORES = ["pictures", "thumbnails", "log"];

export class Storage {
  constructor(database) {
    this.database = database;
  }

  /** Open the storage of a name, for one tab at a time. */
  static async open(name) {
    await claimed(name);
    const request = indexedDB.open(name);
    request.onupgradeneeded = () => {
      for (const store of STORES) request.result.createObjectStore(store, { autoIncrement: store === "log" });
    };
    const database = await answerOf(request).catch((error) => {
      throw new Error(`This browser keeps nothing for this page (${error.message}): open it in another one, or not in a private window.`);
    });
    await navigator.storage?.persist?.().catch(() => false); // else it may be deleted where the disk gets full
    return new Storage(database);
  }

  /** Everything but the thumbnails: {pictures, log}, each log entry with its `key`. */
  async read() {
    const from = this.database.transaction(["pictures", "log"]);
    const log = from.objectStore("log");
    const [pictures, entries, keys] = await Promise.all(
      [from.objectStore("pictures").getAll(), log.getAll(), log.getAllKeys()].map(answerOf),
    );
    return { pictures, log: entries.map((entry, place) => ({ ...entry, key: keys[place] })) };
  }

  /** Keep a picture under a number, with its thumbnail, an ArrayBuffer. */
  addPicture(id, picture, thumbnail) {
    return this.write(["pictures", "thumbnails"], "relaxed", ([pictures, thumbnails]) => {
      pictures.add(picture, id);
      thumbnails.add(thumbnail, id);
    });
  }

  thumbnail(id) {
    return answerOf(this.database.transaction("thumbnails").objectStore("thumbnails").get(id));
  }

  /** Keep an entry of the log on the disk; its key. */
  async append(entry) {
    let request = null;
    await this.write(["log"], "strict", ([log]) => (request = log.add(entry)));
    return request.result;
  }

  /** Take an entry of the log back. */
  drop(key) {
    return this.write(["log"], "strict", ([log]) => log.delete(key));
  }

  write(names, durability, change) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(names, "readwrite", { durability });
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(reasonOf(transaction.error));
      change(names.map((name) => transaction.objectStore(name)));
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
