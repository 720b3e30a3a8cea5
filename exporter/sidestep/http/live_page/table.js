// The table of engines: sorted, filtered, a page at a time.

import { byId, make, setClass, setText } from "./elements.js";
import { UNKNOWN, count, seconds, share } from "./format.js";

const PAGE = 25;
const SYMBOLS = { ok: "●", idle: "○", slow: "▲", stalled: "■", unreachable: "✕", starting: "◌", stopped: "–", asleep: "☾" };
const LEVELS = ["critical", "warning", null, "ok"];

/** Return the key that sorts engines that need attention first, by what is wrong. */
function severity(row) {
  return `${LEVELS.indexOf(row.level)} ${row.attention ?? row.state ?? "unknown"}`;
}

function state(row) {
  const text = row.state ? `${SYMBOLS[row.state] ?? ""} ${row.state}` : UNKNOWN;
  if (row.reason) return `${text} (${row.reason}, ${seconds(row.stalled_seconds)})`;
  return row.attention && row.attention !== row.state ? `${text} (${row.attention})` : text;
}

const latency = (name, title, part) => ({ title: `${title} ${part}`, value: row => row[name]?.[part] ?? null, text: seconds });
const COLUMNS = [
  { title: "Engine", value: row => row.engine, isText: true },
  { title: "Model", value: row => row.model, isText: true },
  { title: "State", value: severity, text: (_, row) => state(row), isText: true },
  { title: "Running", value: row => row.running, text: count },
  { title: "Waiting", value: row => row.waiting, text: count },
  { title: "Prompt tok/s", value: row => row.prompt_tokens_per_second, text: count },
  { title: "Gen. tok/s", value: row => row.generation_tokens_per_second, text: count },
  ...["p50", "p95", "p99"].map(part => latency("ttft", "TTFT", part)),
  ...["p50", "p95", "p99"].map(part => latency("inter_token", "ITL", part)),
  ...["p50", "p95", "p99"].map(part => latency("e2e", "E2E", part)),
  { title: "KV cache", value: row => row.kv_cache_usage, text: share },
  { title: "Prefix hits", value: row => row.prefix_hit_rate, text: share },
  { title: "Finished", value: row => row.finished, text: count },
  { title: "Preempted", value: row => row.preemptions, text: count },
  { title: "Aborted", value: row => row.aborted, text: count },
  { title: "Step age", value: row => row.step_age, text: seconds },
  { title: "Last seen", value: row => row.last_seen, text: seconds },
];
const STATE = COLUMNS.findIndex(column => column.title === "State");

function compare(first, second, column, direction) {
  const [a, b] = [column.value(first), column.value(second)];
  const [isUnknown, isOther] = [a ?? null, b ?? null].map(value => value === null);
  // What is not known comes last in either direction.
  if (isUnknown || isOther) return isUnknown - isOther;
  const order = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  return direction * order || first.id.localeCompare(second.id, undefined, { numeric: true });
}

export class Table {
  /** @param onChoose is called with the id of the engine that the user chooses. */
  constructor(onChoose) {
    this.rows = [];
    this.chosen = null;
    this.sorted = STATE;
    this.direction = 1;
    this.first = 0;
    this.onChoose = onChoose;
    this.body = byId("table").tBodies[0];
    COLUMNS.forEach((column, index) => {
      const button = make("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.sort(index));
      const cell = make("th", { scope: "col" }, button);
      if (column.isText) cell.className = "text";
      byId("table").tHead.rows[0].append(cell);
    });
    byId("filter").addEventListener("input", () => this.turn(-this.first));
    byId("previous").addEventListener("click", () => this.turn(-PAGE));
    byId("next").addEventListener("click", () => this.turn(PAGE));
  }

  sort(index) {
    // Numbers begin with the highest: the worst is what people look for.
    const first = COLUMNS[index].isText ? 1 : -1;
    this.direction = this.sorted === index ? -this.direction : first;
    this.sorted = index;
    this.turn(-this.first);
  }

  turn(by) {
    this.first += by;
    this.show(this.rows, this.chosen);
  }

  show(rows, chosen) {
    this.rows = rows;
    this.chosen = chosen;
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = row => `${row.id} ${row.engine} ${row.model} ${row.dialect} ${row.state ?? ""} ${row.attention ? `attention ${row.attention}` : ""}`.toLowerCase();
    const found = rows.filter(row => words.every(word => text(row).includes(word)));
    found.sort((a, b) => compare(a, b, COLUMNS[this.sorted], this.direction));
    this.first = Math.max(0, Math.min(this.first, Math.ceil(found.length / PAGE) * PAGE - PAGE));
    const shown = found.slice(this.first, this.first + PAGE);
    this.place(shown);
    this.showOrder();
    byId("pager").hidden = found.length <= PAGE;
    const last = this.first + shown.length;
    setText(byId("range"), `${shown.length ? this.first + 1 : 0} to ${last} of ${found.length}`);
    byId("previous").disabled = this.first === 0;
    byId("next").disabled = last >= found.length;
  }

  showOrder() {
    [...byId("table").tHead.rows[0].cells].forEach((cell, index) => {
      if (index === this.sorted) cell.setAttribute("aria-sort", this.direction > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
      const arrow = index === this.sorted ? (this.direction > 0 ? " ▴" : " ▾") : "";
      setText(cell.firstElementChild, COLUMNS[index].title + arrow);
    });
  }

  /** An engine keeps its element, so that a click or the focus stays with it when the order changes. */
  place(shown) {
    const focused = document.activeElement;
    const elements = new Map([...this.body.rows].map(element => [element.dataset.id, element]));
    shown.forEach((row, index) => {
      const element = elements.get(row.id) ?? this.makeRow(row.id);
      elements.delete(row.id);
      if (this.body.rows[index] !== element) this.body.insertBefore(element, this.body.rows[index] ?? null);
      this.fill(element, row);
    });
    for (const element of elements.values()) element.remove();
    // An element that is moved loses the focus.
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  }

  makeRow(id) {
    const element = make("tr", { "data-id": id });
    COLUMNS.forEach((column, index) => {
      const cell = element.insertCell();
      if (column.isText) cell.className = "text";
      if (index === STATE) cell.append(make("span"));
      if (index > 0) return;
      const button = make("button", { type: "button" });
      button.addEventListener("click", () => this.onChoose(id));
      cell.append(button);
    });
    return element;
  }

  fill(element, row) {
    setClass(element, row.id === this.chosen ? "chosen" : "");
    COLUMNS.forEach((column, index) => {
      const value = column.value(row);
      const text = column.text ? column.text(value, row) : value || UNKNOWN;
      setText(element.cells[index].firstElementChild ?? element.cells[index], text);
    });
    setClass(element.cells[STATE].firstElementChild, `state ${row.level ?? ""}`);
  }
}
