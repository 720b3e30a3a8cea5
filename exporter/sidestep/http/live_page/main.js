// The live page: two requests that repeat, and what they are shown in.

import { Charts } from "./charts.js";
import { Curve } from "./curve.js";
import { showDetails } from "./details.js";
import { byId, setClass, setText } from "./elements.js";
import { clock } from "./format.js";
import { HeatMaps } from "./heatmaps.js";
import { Refused, poll } from "./poll.js";
import { showCommands, showExporter, showFindings, showTiles, showVerdict, showWarnings } from "./summary.js";
import { Table } from "./table.js";

const LIVE_INTERVAL = 1_000;
const HISTORY_INTERVAL = 5_000;
const DOCTOR_INTERVAL = 10_000;
const CURVE_INTERVAL = 10_000;

let chosen = new URLSearchParams(location.hash.slice(1)).get("engine");
let live = null;
let failure = null;
let history = null;

const charts = new Charts();
const heatmaps = new HeatMaps();
const curve = new Curve();
const table = new Table(id => choose(id === chosen ? null : id));

function choose(id) {
  chosen = id;
  location.replace(id === null ? "#" : `#engine=${encodeURIComponent(id)}`);
  history = null;
  showDetails(null);
  curve.show(null);
  showLive();
  histories.again();
  curves.again();
}

function row() {
  return chosen === null ? live.total : live.engines.find(each => each.id === chosen);
}

function showLive() {
  // Earlier numbers are out of date, however well the engines were.
  const verdict = failure === null ? live?.verdict : { level: "unknown", text: failure };
  if (verdict) {
    showVerdict(verdict);
    document.title = `sidestep: ${verdict.text}`;
  }
  if (!live) return;
  const hasEngines = live.engines.length > 0;
  for (const id of ["fleet", "engines", "history"]) byId(id).hidden = !hasEngines;
  byId("connect").hidden = hasEngines;
  showExporter(live);
  showWarnings(live.warnings);
  showCommands(live.exporter.endpoints);
  byId("all").hidden = chosen === null;
  setText(byId("scope"), chosen === null ? "all engines" : row()?.engine ?? chosen);
  if (!hasEngines) return;
  showTiles(live.total);
  table.show(live.engines, chosen);
  if (history) charts.show(history, row(), live.time);
}

function connected(answer) {
  live = answer;
  failure = null;
  setClass(document.body, "");
  setText(byId("connection"), `live, ${clock(live.time)}`);
  setClass(byId("connection"), "");
  showLive();
}

function disconnected(error) {
  const isDenied = error instanceof Refused && [401, 403].includes(error.status);
  const since = live ? `; numbers are of ${clock(live.time)}` : "";
  const why = isDenied ? `the exporter denies access (${error.message}): reload the page and log in` : "disconnected, retrying";
  setText(byId("connection"), why + since);
  setClass(byId("connection"), "lost");
  failure = isDenied ? "the exporter denies access" : "the exporter does not answer";
  failure += live ? `; last seen at ${clock(live.time)}` : "";
  setClass(document.body, "lost");
  showLive();
}

poll(() => "api/v1/live", LIVE_INTERVAL, connected, disconnected);
poll(() => "api/v1/doctor", DOCTOR_INTERVAL, answer => showFindings(answer.findings));
const histories = poll(
  () => (chosen === null ? "api/v1/live/history" : `api/v1/live/history?engine=${encodeURIComponent(chosen)}`),
  HISTORY_INTERVAL,
  answer => {
    history = answer;
    heatmaps.show(history);
    showDetails(history.detail);
    showLive();
  },
  error => {
    // The exporter has forgotten the engine.
    if (error instanceof Refused && error.status === 404 && chosen !== null) choose(null);
  },
);

const curves = poll(
  () => (chosen === null ? null : `api/v1/kv/curve?engine=${encodeURIComponent(chosen)}`),
  CURVE_INTERVAL,
  answer => curve.show(answer.engines[0] ?? null),
  () => curve.show(null),
);

byId("all").addEventListener("click", () => choose(null));
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && chosen !== null) choose(null);
});
