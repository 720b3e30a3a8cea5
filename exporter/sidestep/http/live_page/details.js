// Details of one engine: where it hangs, its streams and its configuration.

import { byId, make, setFacts } from "./elements.js";
import { count, seconds } from "./format.js";

const STREAM = [
  ["Stream", stream => stream.id, true],
  ["State", stream => stream.state, true],
  ["Applied", stream => count(stream.applied)],
  ["Lag", stream => count(stream.lag)],
  ["Lost", stream => count(stream.lost)],
  ["Retransmitted", stream => count(stream.retransmitted)],
  ["Folded", stream => count(stream.folded)],
  ["Errors", stream => count(stream.errors)],
  ["Last seen", stream => seconds(stream.last_seen)],
];

function facts(pairs) {
  const list = make("dl", { class: "facts" });
  setFacts(list, pairs);
  return list;
}

function streams(rows) {
  const cell = (name, text, isText) => make(name, isText ? { class: "text" } : {}, text);
  const head = make("tr", {}, ...STREAM.map(([title, , isText]) => {
    const found = cell("th", title, isText);
    found.scope = "col";
    return found;
  }));
  const lines = rows.map(row => make("tr", {}, ...STREAM.map(([, value, isText]) => cell("td", value(row), isText))));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines));
  return make("div", { class: "scroll", role: "region", "aria-label": "Streams", tabindex: "0" }, table);
}

let shown = "";

/** Show the details of an engine; nothing of null. */
export function showDetails(detail) {
  byId("details").hidden = detail === null;
  const key = JSON.stringify(detail);
  if (detail === null || key === shown) return;
  shown = key;
  const parts = [];
  if (detail.stack.length) {
    const text = detail.stack.join("\n");
    parts.push(
      make("h3", {}, "Stack of the thread that makes no progress, the innermost frame last"),
      make("pre", { tabindex: "0", role: "region", "aria-label": "Stack" }, text),
    );
  }
  parts.push(make("h3", {}, "Engine"), facts([
    ["Identity", detail.id],
    ...Object.entries(detail.labels),
    ["Restarts", count(detail.restarts)],
    ["Features", detail.features.join(", ") || "none"],
  ]));
  parts.push(make("h3", {}, "Streams"), streams(detail.streams));
  for (const [name, labels] of Object.entries(detail.info)) {
    parts.push(make("h3", {}, name), facts(Object.entries(labels)));
  }
  byId("detail").replaceChildren(...parts);
}
