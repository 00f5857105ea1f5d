// The engine of labelling: requests to the server of `vitascope label`. A page without a server has another one.

/** What an engine does beside labelling: `begin({attempt})` may add to `#tools` and `#outputs` of the page. */
export const abilities = {};
/** The page's texts in Chinese by the English ones. */
export const fetchTexts = () => ask("web/chinese.json");
/** The state; with `after`, once its version is another one, or after a while. */
export const state = (after) => ask(`api/state${after === undefined ? "" : `?after=${after}`}`);
/** {pictures, total} of the view "next", "doubtful", "suspects" or "labelled"; of one class if it is named. */
export const pictures = (view, count, label) =>
  ask(`api/pictures?${new URLSearchParams({ view, count, ...(label && { label }) })}`);
/** Save [{id, labels}], where null takes the labels away and a new name adds a class; the state, as of all below. */
export const decide = (decisions) => ask("api/decide", { decisions });
/** Offer these pictures no more. */
export const skip = (ids) => ask("api/skip", { ids });
/** Take the last decisions back; the state has the `ids` of their pictures too. */
export const undo = () => ask("api/undo", {});
/** Label all that the view "doubtful" lists, as the classifier of that number has it. */
export const accept = (label, fit) => ask("api/accept", { label, fit });
/** The address of a picture, its longest side at most `side` pixels. */
export const thumbnail = (id, side) => `picture/${id}?side=${side}`;

async function ask(path, content) {
  const headers = { "Content-Type": "application/json" };
  let response, answer;
  try {
    response = await fetch(path, content && { method: "POST", headers, body: JSON.stringify(content) });
    answer = await response.json();
  } catch {
    throw new Error("The server has ended. Run the command again: it goes on where it was.");
  }
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
