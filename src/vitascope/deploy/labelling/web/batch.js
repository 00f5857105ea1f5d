// The pictures of a view that are on the page, and those that come after them.

import { at } from "./elements.js";
import { pictures, thumbnail } from "./engine.js";

export const SIDE = 480; // pixels of a picture in the grid
const NARROW = matchMedia("(max-width: 40rem)"); // as in style.css
const LEFT = 4; // pictures without an answer when the next ones are fetched

export class Batch {
  view = "next";
  name = ""; // the class of the view, if it has one
  times = 1; // as many pictures as usual
  pictures = [];
  place = 0; // of the current picture
  total = null; // not known yet
  seen = new Map(); // id -> picture, of all that were shown
  handled = new Set(); // ids of those that are labelled or skipped
  ahead = null; // the promise of the pictures after these
  asked = 0;

  get current() { return this.pictures[this.place]; }
  get count() { return this.times * (NARROW.matches ? 6 : 12); }
  get left() { return this.pictures.filter(({ id }) => !this.handled.has(id)); }

  /** Show the first pictures of a view, or those of `ahead` that are not labelled meanwhile. */
  async open(view, name = "", times = 1, ahead = null) {
    const asked = ++this.asked;
    Object.assign(this, { view, name, times, ahead: null });
    const fresh = ((await ahead) ?? []).filter(({ id }) => !this.handled.has(id));
    const found = fresh.length ? { pictures: fresh, total: this.total } : await pictures(view, this.count, name);
    if (asked !== this.asked) return; // another view was opened meanwhile
    Object.assign(this, { place: 0, total: found.total });
    this.pictures = found.pictures.slice(0, this.count).map((one) => {
      const picture = Object.assign(this.seen.get(one.id) ?? { past: [] }, one);
      if (!picture.pending) this.handled.delete(one.id);
      this.seen.set(one.id, picture);
      return picture;
    });
  }

  /** Fetch the pictures after these, and their thumbnails, if few are left here. */
  prepare() {
    if (this.view !== "next" || this.left.length > LEFT) return;
    const load = async () => {
      const found = (await pictures("next", this.count + this.left.length)).pictures;
      const after = found.filter(({ id }) => !this.pictures.some((shown) => shown.id === id));
      for (const { id } of after) new Image().src = await thumbnail(id, SIDE);
      return after;
    };
    this.ahead ??= load().catch(() => null); // asked for again, and its error shown, when it is needed
  }

  /** Change those of the pictures that were shown. */
  change(ids, isHandled, change) {
    for (const id of ids) {
      this.handled[isHandled ? "add" : "delete"](id);
      if (this.seen.has(id)) change(this.seen.get(id));
    }
  }

  /** What the engine took back; the first of the pictures becomes the current one. */
  restore(ids) {
    this.change(ids, false, (picture) => Object.assign(picture, picture.past.pop() ?? { labels: null }));
    const first = this.seen.get(ids[0]);
    if (!first) return this.open(this.view, this.name);
    if (!this.pictures.includes(first)) this.pictures = [first, ...this.pictures].slice(0, this.count);
    this.place = this.pictures.indexOf(first);
  }

  /** Go on to the next picture without an answer, or else to the next one. */
  advance() {
    const after = this.pictures.map((_, step) => (this.place + 1 + step) % this.pictures.length);
    this.place = after.find((place) => this.left.includes(this.pictures[place])) ?? after[0];
  }

  /** Go to a picture beside the current one. */
  move(right, down) {
    const columns = getComputedStyle(at("grid")).gridTemplateColumns.split(" ").length;
    if (this.pictures[this.place + right + down * columns]) this.place += right + down * columns;
  }
}
