// The verdict, and under it each engine that needs attention: what is wrong, where it hangs, why, what to do.

import { byId, engineLink, make, onChange, setClass, setName, setText } from "./elements.js";
import { sign, stateClass } from "./states.js";

const SHOWN = 3;
const FRAMES = 6;
const VERDICT_SIGNS = { ok: "●", warning: "▲", critical: "■", quiet: "–", unknown: "?" };

let causes = {};

/** Load the texts on causes, the same that `sidestep why` shows. */
export async function loadCauses() {
  const answer = await fetch("ui/tuning.json");
  if (answer.ok) causes = await answer.json();
}

function stack(frames) {
  const inner = frames.slice(-FRAMES).reverse();
  const parts = [make("pre", { tabindex: "0", role: "region", "aria-label": "Stack, the innermost frame first" }, inner.join("\n"))];
  if (frames.length > inner.length) {
    const rest = frames.slice(0, -FRAMES).reverse().join("\n");
    parts.push(make("details", {}, make("summary", {}, `${frames.length - inner.length} more frames`), make("pre", { tabindex: "0" }, rest)));
  }
  return parts;
}

/** Return why its requests are slow and what to do, as far as that follows from its cause. */
export function advice(name, dialect) {
  const cause = causes[name];
  if (!cause) return [];
  const own = cause.changes[dialect];
  const todo = [own && `${own}.`, cause.otherwise].filter(Boolean).join(" ");
  return [
    make("p", {}, make("strong", {}, "Why: "), cause.meaning),
    make("p", {}, make("strong", {}, "What to do: "), todo[0].toUpperCase() + todo.slice(1)),
    make("p", { class: "note" }, `Not if ${cause.unless}`),
  ];
}

class Finding {
  constructor(id) {
    this.sign = make("span", { class: "sign", "aria-hidden": "true" });
    this.link = engineLink(id, "");
    this.problem = make("span");
    this.more = make("div", { class: "more" });
    this.element = make("li", { "data-id": id }, make("p", {}, this.sign, this.link, " ", this.problem), this.more);
    this.setMore = onChange((frames, cause, dialect, isFirst, _isLoaded) => {
      const texts = advice(cause, dialect);
      const parts = frames ? stack(frames) : [];
      if (isFirst) parts.push(...texts);
      else if (texts.length) parts.push(make("details", {}, make("summary", {}, "Why, and what to do"), ...texts));
      this.more.replaceChildren(...parts);
    });
  }

  show(row, name, isFirst) {
    setClass(this.element, stateClass(row));
    setText(this.sign, sign(row));
    setName(this.link, row.id, name);
    setText(this.problem, row.problem);
    this.setMore(row.stack, row.cause, row.dialect, isFirst, row.cause in causes);
  }
}

const findings = new Map();

/** Show the verdict and the engines it counts; of an unknown level, when they are out of date, as they were. */
export function showVerdict(verdict, rows, names) {
  const troubled = rows.filter(row => row.attention);
  const level = verdict.level ?? "quiet";
  const many = troubled.length === 1 ? "1 engine needs attention" : `${troubled.length} engines need attention`;
  setText(byId("verdict-text"), `${VERDICT_SIGNS[level]} ${troubled.length && level !== "unknown" ? many : verdict.text}`);
  setClass(byId("verdict"), level);
  const shown = troubled.slice(0, SHOWN);
  for (const [id, finding] of findings) {
    if (shown.some(row => row.id === id)) continue;
    finding.element.remove();
    findings.delete(id);
  }
  shown.forEach((row, index) => {
    if (!findings.has(row.id)) findings.set(row.id, new Finding(row.id));
    const { element } = findings.get(row.id);
    const list = byId("attention");
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
    findings.get(row.id).show(row, names.get(row.id), index === 0);
  });
}
