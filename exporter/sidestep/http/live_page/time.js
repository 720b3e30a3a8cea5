// Where the time of requests goes, and which limits hold: a bar and a strip for each engine, one colour a limit.

import { byId, engineLink, make, onChange, setText } from "./elements.js";
import { clock, seconds, share } from "./format.js";

const FEW = 6;
const MANY = 100;
const SPAN = 600;
// Share of a part below which it has no word.
const LEAST = 0.005;
const QUEUE = "queue.";

/** Return the name of a part as people read it. */
const partName = part => (part === "queue.none" ? "queue, next step" : part.replace(QUEUE, "queue, ").replaceAll("_", " "));
const partClass = part => (part.startsWith(QUEUE) ? `limit-${part.slice(QUEUE.length)}` : `part-${part}`);

/** Make a bar of parts, as wide as their sum is of `whole`. */
export function partsBar(parts, whole) {
  const total = Object.values(parts).reduce((sum, each) => sum + each, 0);
  const bar = make("div", { class: "bar-line", role: "img", "aria-label": partsText(parts, 9) });
  for (const [part, length] of Object.entries(parts)) {
    const segment = make("span", { class: partClass(part), title: `${partName(part)}: ${seconds(length)}, ${share(length / total)}` });
    segment.style.width = `${(100 * length) / whole}%`;
    bar.append(segment);
  }
  return bar;
}

/** Return the largest parts as a text. */
export function partsText(parts, most) {
  const total = Object.values(parts).reduce((sum, each) => sum + each, 0);
  const largest = Object.entries(parts).filter(([, length]) => length >= LEAST * total).sort((a, b) => b[1] - a[1]).slice(0, most);
  return largest.map(([part, length]) => `${partName(part)} ${share(length / total)}`).join(", ");
}

function showLegend(id, entries) {
  byId(id).replaceChildren(...entries.map(([name, text]) => make("li", {}, make("span", { class: `swatch ${name}` }), text)));
}

const line = (id, name, bar, text) => make("li", { "data-id": id }, engineLink(id, name), bar, make("span", { class: "summary" }, text));
const empty = text => make("li", { class: "note" }, text);

const showParts = onChange(lines => {
  const found = lines.map(([id, name, parts]) => {
    const total = Object.values(parts).reduce((sum, each) => sum + each, 0);
    return line(id, name, partsBar(parts, total), partsText(parts, 2));
  });
  byId("parts").replaceChildren(...(found.length ? found : [empty("No request whose parts are known has ended in the last minute.")]));
  const names = [...new Set(lines.flatMap(([, , parts]) => Object.keys(parts)))];
  showLegend("parts-legend", names.map(part => [partClass(part), partName(part)]));
});

/** Return stretches of the same limit: its index, and its first and last interval. */
function stretches(limits) {
  const found = [];
  limits.forEach((limit, index) => {
    if (found.at(-1)?.limit === limit) found.at(-1).last = index;
    else found.push({ limit, first: index, last: index });
  });
  return found.filter(each => each.limit >= 0);
}

function strip(limits, names, times, now) {
  const bar = make("div", { class: "bar-line strip", role: "img" });
  const ends = times.slice(-limits.length);
  const known = limits.slice(-ends.length);
  const interval = ends.length > 1 ? (ends.at(-1) - ends[0]) / (ends.length - 1) : 5;
  const place = time => Math.max(0, 100 * (1 - (now - time) / SPAN));
  for (const { limit, first, last } of stretches(known)) {
    const [from, to] = [ends[first] - interval, ends[last]];
    const segment = make("span", { class: `limit-${names[limit]}`, title: `${names[limit]}, ${clock(from)} to ${clock(to)}` });
    segment.style.left = `${place(from)}%`;
    segment.style.width = `${place(to) - place(from)}%`;
    bar.append(segment);
  }
  return bar;
}

/** Return the limits of a strip as a text, those that held longest first. */
function limitsText(limits, names) {
  const known = limits.filter(limit => limit >= 0);
  const counts = new Map();
  for (const limit of known) counts.set(limit, (counts.get(limit) ?? 0) + 1);
  const largest = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 2);
  return largest.map(([limit, times]) => `${names[limit]} ${share(times / known.length)}`).join(", ");
}

const showLimits = onChange((lines, names, times) => {
  const now = times.at(-1);
  const found = lines.map(([id, name, limits]) => {
    const text = limitsText(limits, names);
    const bar = strip(limits, names, times, now);
    bar.setAttribute("aria-label", text);
    return line(id, name, bar, text);
  });
  byId("limits").replaceChildren(...(found.length ? found : [empty("No engine reports its limits: vLLM does with the tap in its core.")]));
  byId("limits-axis").hidden = !found.length;
  const used = [...new Set(lines.flatMap(([, , limits]) => limits))].filter(limit => limit >= 0).sort((a, b) => a - b);
  showLegend("limits-legend", used.map(limit => [`limit-${names[limit]}`, names[limit] === "none" ? "none: nobody waited" : names[limit]]));
});

let most = FEW;
let last = null;

byId("more-time").addEventListener("click", () => {
  most = most === FEW ? MANY : FEW;
  showTime(...last);
});

/** Show the bars and strips of engines, in their order; of the chosen one only, if there is one. */
export function showTime(rows, chosen, names, history) {
  last = [rows, chosen, names, history];
  const wanted = chosen === null ? rows : rows.filter(row => row.id === chosen);
  const parts = wanted.filter(row => row.parts).map(row => [row.id, names.get(row.id), row.parts]);
  const strips = new Map(history.limits.map(each => [each.id, each.limits]));
  const limits = wanted.filter(row => strips.has(row.id)).map(row => [row.id, names.get(row.id), strips.get(row.id)]);
  showParts(parts.slice(0, most));
  showLimits(limits.slice(0, most), history.limit_names, history.times);
  const total = Math.max(parts.length, limits.length);
  byId("more-time").hidden = total <= FEW;
  setText(byId("more-time"), most === FEW ? `Show all ${Math.min(total, MANY)} engines` : "Show fewer engines");
}
