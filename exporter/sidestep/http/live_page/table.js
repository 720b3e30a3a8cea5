// The tables of engines: sorted, filtered, a page at a time. Engines with numbers of their own, such as models of
// Triton, have a table of their own; no table has a column that none of its engines has a number for.

import { byId, engineLink, make, setClass, setName, setText } from "./elements.js";
import { UNKNOWN, age, count, seconds, share } from "./format.js";
import { makeState, severity, showState, worstFirst } from "./states.js";

const PAGE = 25;

const latency = (name, title, part) => ({
  key: `${name}_${part}`, title: `${title} ${part}`, value: row => row[name]?.[part], text: seconds, isExtra: part !== "p95",
});
const ENGINE = { key: "engine", title: "Engine", value: row => row.engine, isText: true };
const MODEL = { key: "model", title: "Model", value: row => row.model || null, isText: true };
const STATE = { key: "state", title: "State", value: severity, isText: true };
const SEEN = { key: "last_seen", title: "Seen", value: row => row.last_seen, text: number => (number < 1.5 ? "now" : age(number)) };
const COLUMNS = [
  ENGINE,
  MODEL,
  STATE,
  { key: "running", title: "Run", value: row => row.running, text: count },
  { key: "waiting", title: "Wait", value: row => row.waiting, text: count },
  { key: "saturation", title: "Load", value: row => row.saturation, text: share },
  { key: "kv_cache_usage", title: "KV", value: row => row.kv_cache_usage, text: share },
  { key: "prefix_hit_rate", title: "Hits", value: row => row.prefix_hit_rate, text: share },
  ...["p50", "p95", "p99"].map(part => latency("ttft", "TTFT", part)),
  ...["p50", "p95", "p99"].map(part => latency("inter_token", "ITL", part)),
  ...["p50", "p95", "p99"].map(part => latency("e2e", "E2E", part)),
  { key: "prompt", title: "In/s", value: row => row.prompt_tokens_per_second, text: count },
  { key: "generation", title: "Out/s", value: row => row.generation_tokens_per_second, text: count },
  {
    key: "limit", title: "Limit", value: row => row.limit, isText: true,
    text: (limit, row) => (row.limit_share ? `${limit} ${share(row.limit_share)}` : limit),
  },
  SEEN,
  { key: "finished", title: "Ended", value: row => row.finished, text: count, isExtra: true },
  { key: "preemptions", title: "Preempted", value: row => row.preemptions, text: count, isExtra: true },
  { key: "aborted", title: "Aborted", value: row => row.aborted, text: count, isExtra: true },
  { key: "step_age", title: "Step age", value: row => row.step_age, text: age, isExtra: true },
];
const OWN_TITLES = {
  requests_per_second: "Requests/s", failures_per_second: "Failures/s", mean_queue_seconds: "Mean queue", mean_latency_seconds: "Mean latency",
};

/** Return the columns of engines with numbers of their own, of which names tell titles and units. */
function ownColumns(rows) {
  const names = [...new Set(rows.flatMap(row => Object.keys(row.own)))];
  const own = names.map(name => ({
    key: name, title: OWN_TITLES[name] ?? name.replaceAll("_", " "), value: row => row.own[name], text: /_seconds$/.test(name) ? seconds : count,
  }));
  return [ENGINE, MODEL, STATE, ...own, SEEN];
}

const known = value => value !== null && value !== undefined;

function compare(first, second, column, direction) {
  if (column === STATE) return direction * worstFirst(first, second);
  const [a, b] = [column.value(first), column.value(second)];
  // What is not known comes last in either direction.
  if (!known(a) || !known(b)) return !known(a) - !known(b) || worstFirst(first, second);
  const order = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  return direction * order || first.id.localeCompare(second.id, undefined, { numeric: true });
}

/** One table, of which the pager and the filter are shared. */
class Rows {
  constructor(table, onSort) {
    this.columns = [];
    this.onSort = onSort;
    table.append(make("thead", { role: "rowgroup" }, make("tr", { role: "row" })), make("tbody", { role: "rowgroup" }));
    this.table = table;
    this.head = table.tHead.rows[0];
    this.body = table.tBodies[0];
  }

  /** Whether the pointer or the focus is on a row, which then must not move. */
  get isHeld() {
    return this.body.matches(":hover") || this.body.contains(document.activeElement);
  }

  setColumns(columns) {
    if (columns.length === this.columns.length && columns.every((column, index) => column.key === this.columns[index].key)) return;
    this.columns = columns;
    this.body.replaceChildren();
    this.head.replaceChildren(...columns.map(column => {
      const button = make("button", { type: "button" }, column.title);
      button.addEventListener("click", () => this.onSort(column));
      return make("th", { scope: "col", role: "columnheader", class: `c-${column.key}${column.isText ? " text" : ""}` }, button);
    }));
  }

  showOrder(sorted, direction) {
    this.columns.forEach((column, index) => {
      const cell = this.head.cells[index];
      const isSorted = column.key === sorted.key;
      if (isSorted) cell.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
      setText(cell.firstElementChild, column.title + (isSorted ? (direction > 0 ? " ▴" : " ▾") : ""));
    });
  }

  /** An engine keeps its element, so that a click or the focus stays with it when the order changes. */
  show(rows, chosen, names) {
    this.table.parentElement.hidden = !rows.length;
    const focused = document.activeElement;
    const elements = new Map([...this.body.rows].map(element => [element.dataset.id, element]));
    rows.forEach((row, index) => {
      const element = elements.get(row.id) ?? this.makeRow(row.id);
      elements.delete(row.id);
      if (this.body.rows[index] !== element) this.body.insertBefore(element, this.body.rows[index] ?? null);
      this.fill(element, row, row.id === chosen, names.get(row.id));
    });
    for (const element of elements.values()) element.remove();
    // An element that is moved loses the focus.
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
  }

  makeRow(id) {
    const element = make("tr", { role: "row", "data-id": id });
    for (const column of this.columns) {
      const cell = make("td", { role: "cell", class: `c-${column.key}${column.isText ? " text" : ""}`, "data-title": column.title });
      if (column === ENGINE) cell.append(engineLink(id, ""));
      if (column === STATE) cell.append(makeState());
      element.append(cell);
    }
    return element;
  }

  fill(element, row, isChosen, name) {
    setClass(element, `${row.attention ? `needs ${row.level}` : ""}${isChosen ? " chosen" : ""}`);
    this.columns.forEach((column, index) => {
      const cell = element.cells[index];
      if (column === STATE) return showState(cell.firstElementChild, row);
      if (column === ENGINE) {
        const link = cell.firstElementChild;
        setName(link, row.id, name);
        if (isChosen) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
        return;
      }
      const value = column.value(row);
      cell.classList.toggle("unknown", !known(value));
      setText(cell, !known(value) ? UNKNOWN : column.text ? column.text(value, row) : value);
      if (column === MODEL) cell.title = value ?? "";
    });
  }
}

export class Table {
  constructor() {
    this.rows = [];
    this.chosen = null;
    this.names = new Map();
    this.sorted = STATE;
    this.direction = 1;
    this.first = 0;
    this.shown = [];
    this.isAttention = false;
    this.more = new Set(JSON.parse(localStorage.getItem("columns") ?? "[]"));
    this.engines = new Rows(byId("table"), column => this.sort(column));
    this.models = new Rows(byId("own-table"), column => this.sort(column));
    byId("filter").addEventListener("input", () => this.turn(-this.first));
    byId("previous").addEventListener("click", () => this.turn(-PAGE));
    byId("next").addEventListener("click", () => this.turn(PAGE));
    byId("only-attention").addEventListener("click", () => {
      this.isAttention = !this.isAttention;
      byId("only-attention").setAttribute("aria-pressed", this.isAttention);
      this.turn(-this.first);
    });
    this.offerColumns();
  }

  offerColumns() {
    const list = byId("columns").lastElementChild;
    for (const { key, title } of COLUMNS.filter(column => column.isExtra)) {
      const box = make("input", { type: "checkbox" });
      box.checked = this.more.has(key);
      box.addEventListener("change", () => {
        if (box.checked) this.more.add(key);
        else this.more.delete(key);
        localStorage.setItem("columns", JSON.stringify([...this.more]));
        this.turn(0);
      });
      list.append(make("label", {}, box, ` ${title}`));
    }
  }

  sort(column) {
    // Numbers begin with the highest: the worst is what people look for.
    const first = column.isText ? 1 : -1;
    this.direction = this.sorted.key === column.key ? -this.direction : first;
    this.sorted = column;
    this.turn(-this.first);
  }

  /** Turn to another page, or take another order, at the user's wish. */
  turn(by) {
    this.first += by;
    this.shown = [];
    this.show(this.rows, this.chosen, this.names);
  }

  show(rows, chosen, names) {
    this.rows = rows;
    this.chosen = chosen;
    this.names = names;
    const troubled = rows.filter(row => row.attention).length;
    setText(byId("only-attention"), `Needs attention ${troubled}`);
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = row => `${row.id} ${row.engine} ${row.model} ${row.dialect} ${row.state ?? ""} ${row.attention ? `attention ${row.attention}` : ""}`.toLowerCase();
    const found = rows.filter(row => (!this.isAttention || row.attention) && words.every(word => text(row).includes(word)));
    found.sort((a, b) => compare(a, b, this.sorted, this.direction));
    if (this.engines.isHeld || this.models.isHeld) {
      const places = new Map(this.shown.map((id, index) => [id, index]));
      found.sort((a, b) => (places.get(a.id) ?? Infinity) - (places.get(b.id) ?? Infinity) || 0);
    }
    this.shown = found.map(row => row.id);
    this.first = Math.max(0, Math.min(this.first, Math.ceil(found.length / PAGE) * PAGE - PAGE));
    const page = found.slice(this.first, this.first + PAGE);
    this.showTable(this.engines, COLUMNS, page.filter(row => !row.own), rows.filter(row => !row.own));
    const models = rows.filter(row => row.own);
    this.showTable(this.models, ownColumns(models), page.filter(row => row.own), models);
    byId("pager").hidden = found.length <= PAGE;
    const last = this.first + page.length;
    setText(byId("range"), `${page.length ? this.first + 1 : 0} to ${last} of ${found.length}`);
    byId("previous").disabled = this.first === 0;
    byId("next").disabled = last >= found.length;
  }

  /** Show rows of one table, with the columns for which any of `all` has a number. */
  showTable(table, columns, rows, all) {
    const isShown = column => (column.isExtra ? this.more.has(column.key) : all.some(row => known(column.value(row))));
    table.setColumns(columns.filter(column => column === ENGINE || column === STATE || isShown(column)));
    table.showOrder(this.sorted, this.direction);
    table.show(rows, this.chosen, this.names);
  }
}
