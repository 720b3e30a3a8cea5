// States of engines: each has one sign and one colour, here, in `sidestep top` and in docs/live.md.

import { make, setClass, setText } from "./elements.js";
import { UNKNOWN, age } from "./format.js";

const SIGNS = { ok: "●", idle: "○", slow: "▲", stalled: "■", unreachable: "□", starting: "◌", asleep: "☾", stopped: "–" };
const LEVELS = ["critical", "warning", null, "ok"];

/** Return the sign of an engine: of its state, or of what it needs attention for besides. */
export function sign(row) {
  if (row.attention && row.attention !== row.state) return "▲";
  return SIGNS[row.state] ?? "";
}

export function stateText(row) {
  const state = row.state ?? UNKNOWN;
  if (row.stalled_seconds) return `${state} ${age(row.stalled_seconds)}`;
  return row.attention && row.attention !== row.state ? `${state}, ${row.attention}` : state;
}

/** Return the classes of a state's text. */
export function stateClass(row) {
  return `state ${row.level ?? "quiet"} ${row.state ?? ""}`;
}

export function makeState() {
  return make("span", {}, make("span", { class: "sign", "aria-hidden": "true" }), make("span"));
}

export function showState(element, row) {
  setClass(element, stateClass(row));
  setText(element.firstElementChild, sign(row));
  setText(element.lastElementChild, stateText(row));
}

/** Return the key that sorts engines that need attention first, the worst kind first. */
export function severity(row) {
  return row.attention ? `${LEVELS.indexOf(row.level)} ${row.attention}` : "9";
}

const byName = (a, b) => a.engine.localeCompare(b.engine, undefined, { numeric: true }) || a.id.localeCompare(b.id);

/** Order engines: those that need attention first, then by name. */
export function worstFirst(a, b) {
  return severity(a).localeCompare(severity(b)) || byName(a, b);
}

const LONG = 24;

/**
 * Return the short names of engines by identity: of long ones, what tells them apart from others of their kind.
 * An identity consists of words and of pairs key=value, between slashes and commas.
 */
export function shortNames(rows) {
  const names = new Map(rows.map(row => [row.id, row.engine]));
  for (const dialect of new Set(rows.map(row => row.dialect))) {
    const same = rows.filter(row => row.dialect === dialect);
    const words = same.map(row => row.engine.split(/[/,]/));
    const differs = word => {
      const key = word.includes("=") ? word.slice(0, word.indexOf("=") + 1) : null;
      if (key === null) return same.length === 1 || !words.every(each => each.includes(word));
      return words.some(each => each.some(other => other.startsWith(key) && other !== word));
    };
    const short = words.map(each => [dialect, ...each.filter(word => differs(word) && word !== dialect)].join(" "));
    same.forEach((row, index) => {
      const isLong = row.engine.length > LONG && row.engine.includes("=");
      if (isLong && short.filter(each => each === short[index]).length === 1) names.set(row.id, short[index]);
    });
  }
  return names;
}
