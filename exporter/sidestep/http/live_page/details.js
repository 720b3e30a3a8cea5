// Details of one engine: its state and streams, its slowest requests, and its configuration.

import { advice } from "./attention.js";
import { byId, make, onChange, setFacts } from "./elements.js";
import { age, clock, count, seconds } from "./format.js";
import { partsBar, partsText } from "./time.js";

const STREAM = [
  ["Stream", stream => stream.id, true],
  ["State", stream => stream.state, true],
  ["Applied", stream => count(stream.applied)],
  ["Lag", stream => count(stream.lag)],
  ["Lost", stream => count(stream.lost)],
  ["Retransmitted", stream => count(stream.retransmitted)],
  ["Folded", stream => count(stream.folded)],
  ["Errors", stream => count(stream.errors)],
  ["Last seen", stream => age(stream.last_seen)],
];
const SETTINGS = [
  "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_running_requests", "max_prefill_tokens", "chunked_prefill_size",
  "gpu_memory_utilization", "mem_fraction_static", "num_gpu_blocks", "block_size", "page_size", "cache_dtype", "kv_cache_dtype",
  "enable_prefix_caching", "tensor_parallel_size", "tp_size", "data_parallel_size", "dp_size",
];
const UNSET = new Set(["None", "", "[]", "{}", "null"]);
const LONGEST = 60;

function facts(pairs) {
  const list = make("dl", { class: "facts" });
  setFacts(list, pairs.map(([name, text]) => [name, text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text]));
  pairs.forEach(([, text], index) => {
    if (text.length > LONGEST) list.children[index].lastElementChild.title = text;
  });
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

const showState = onChange((row, detail) => {
  const parts = [];
  if (row?.problem) parts.push(make("p", {}, make("strong", {}, row.problem)), ...advice(row.cause, row.dialect));
  if (detail.stack.length) {
    parts.push(
      make("h3", {}, "Stack of the thread that makes no progress, the innermost frame last"),
      make("pre", { tabindex: "0", role: "region", "aria-label": "Stack" }, detail.stack.join("\n")),
    );
  }
  byId("detail").replaceChildren(...parts);
});

const showConfiguration = onChange(detail => {
  const all = Object.values(detail.info).flatMap(Object.entries);
  const settings = SETTINGS.flatMap(name => all.filter(([each, text]) => each === name && !UNSET.has(text)).slice(0, 1));
  const identity = [["Identity", detail.id], ...Object.entries(detail.labels), ["Restarts", count(detail.restarts)], ["Features", detail.features.join(", ") || "none"]];
  const groups = Object.entries(detail.info).map(([name, labels]) => {
    const set = Object.entries(labels).filter(([, text]) => !UNSET.has(text));
    return make("details", {}, make("summary", {}, `${name}: ${count(set.length)} of ${count(Object.keys(labels).length)} set`), facts(set));
  });
  byId("configuration").replaceChildren(
    ...(settings.length ? [make("h3", {}, "Settings"), facts(settings)] : []),
    make("details", {}, make("summary", {}, "Identity and labels"), facts(identity)),
    ...groups,
    make("details", {}, make("summary", {}, `Streams: ${count(detail.streams.length)}`), streams(detail.streams)),
  );
});

/** Show the details of an engine, which is not null, and of its row now, if that is known. */
export function showDetails(row, detail) {
  showState(row && { problem: row.problem, cause: row.cause, dialect: row.dialect }, detail);
  // What changes every second would close what the user has opened.
  const isOpen = byId("configuration").querySelector("details[open]") !== null;
  const isSame = byId("configuration").dataset.id === detail.id;
  if (!isOpen || !isSame) showConfiguration(detail);
  byId("configuration").dataset.id = detail.id;
}

/** Return the parts of a request; of one whose record has none, its intervals. */
function partsOf(record) {
  if (record.parts && Object.keys(record.parts).length) return record.parts;
  const intervals = { "queue.unknown": record.queue_seconds, prefill: record.prefill_seconds, decode: record.decode_seconds };
  return Object.fromEntries(Object.entries(intervals).filter(([, length]) => length));
}

function requestLine(record, whole) {
  const parts = partsOf(record);
  const bar = partsBar(parts, whole);
  if (record.ttft_seconds !== null) {
    const mark = make("i", { class: "first-token", title: `first token after ${seconds(record.ttft_seconds)}` });
    mark.style.left = `${(100 * record.ttft_seconds) / whole}%`;
    bar.append(mark);
  }
  const sizes = `${count(record.prompt_tokens)} prompt tokens, ${count(record.cached_tokens)} of them cached; ${count(record.output_tokens)} generated`;
  const name = record.id || record.key;
  return make(
    "li", {},
    make("p", {}, make("strong", {}, `${seconds(record.e2e_seconds)}`), `, TTFT ${seconds(record.ttft_seconds)}, ended ${clock(Date.parse(record.time) / 1000)} (${record.reason}); ${sizes}`),
    bar,
    make("p", { class: "note" }, `${partsText(parts, 4)}. Request ${name}`),
  );
}

/** Show the time lines of an engine's slowest requests, from their arrival on, in one scale. */
export const showRequests = onChange(records => {
  const known = records.filter(record => record.e2e_seconds);
  const whole = Math.max(...known.map(record => record.e2e_seconds), 0);
  byId("requests").replaceChildren(...(known.length
    ? [make("h3", {}, "Slowest requests of the last ten minutes, from arrival to end"), make("ol", { class: "requests" }, ...known.map(record => requestLine(record, whole)))]
    : []));
});
