// The live page: requests that repeat, and what they are shown in.

import { loadCauses, showVerdict } from "./attention.js";
import { Charts } from "./charts.js";
import { Curve } from "./curve.js";
import { showDetails, showRequests } from "./details.js";
import { byId, setClass, setText, startTheme } from "./elements.js";
import { age, clock } from "./format.js";
import { HeatMaps } from "./heatmaps.js";
import { Refused, isPolling, pause, poll } from "./poll.js";
import { shortNames, worstFirst } from "./states.js";
import { showCommands, showExporter, showFindings, showTiles, showWarnings } from "./summary.js";
import { Table } from "./table.js";
import { showTime } from "./time.js";

const LIVE_INTERVAL = 1_000;
const HISTORY_INTERVAL = 5_000;
const DOCTOR_INTERVAL = 10_000;
const CURVE_INTERVAL = 10_000;
const REQUESTS_INTERVAL = 10_000;
const SLOWEST = 3;
// Two polls without an answer.
const STALE = 3 * LIVE_INTERVAL;
const CHOSEN = "#engine=";
// The exporter links it unless it keeps no time lines.
const HAS_TIMELINES = document.querySelector('a[href="api/v1/timeline"]') !== null;

let chosen = null;
let live = null;
let answeredAt = performance.now();
let failure = null;
let history = null;

startTheme();
const charts = new Charts();
const heatmaps = new HeatMaps();
const curve = new Curve();
const table = new Table();

const query = path => (chosen === null ? null : `${path}engine=${encodeURIComponent(chosen)}`);

/** Choose the engine of the page's address, or none. */
function choose() {
  const found = location.hash.startsWith(CHOSEN) ? decodeURIComponent(location.hash.slice(CHOSEN.length)) : null;
  if (found === chosen || (found === null && location.hash.length > 1)) return;
  chosen = found;
  history = null;
  byId("details").hidden = true;
  curve.show(null);
  showRequests([]);
  showLive();
  for (const each of [histories, curves, requests]) each.again();
}

function chooseNone() {
  location.hash = "";
}

function row() {
  return chosen === null ? live.total : live.engines.find(each => each.id === chosen);
}

function showLive() {
  if (!live) return showState();
  const rows = [...live.engines].sort(worstFirst);
  const names = shortNames(rows);
  showState();
  if (failure === null) showVerdict(live.verdict, rows, names);
  else showVerdict({ level: "unknown", text: failure }, rows, names);
  const hasEngines = rows.length > 0;
  for (const id of ["fleet", "engines", "history", "time"]) byId(id).hidden = !hasEngines;
  byId("connect").hidden = hasEngines;
  showExporter(live);
  showWarnings(live.warnings);
  showCommands(live.exporter.endpoints);
  showDashboards();
  setText(byId("scope"), chosen === null ? "all engines" : names.get(chosen) ?? chosen);
  if (hasEngines) {
    showTiles(live.total);
    table.show(rows, chosen, names);
    if (history) {
      charts.show(history, row(), live.time);
      heatmaps.show(history, live.time);
      showTime(rows, chosen, names, history);
      if (history.detail) {
        showDetails(row(), history.detail);
        setText(byId("details-title"), `Engine ${names.get(chosen) ?? chosen}`);
        byId("details").hidden = false;
      }
    }
  }
  // Nothing moves while the first data come.
  if (history || !hasEngines) document.body.classList.remove("loading");
}

function showDashboards() {
  const link = byId("dashboards");
  link.hidden = !live.exporter.dashboards;
  if (link.hidden) return;
  const url = new URL(live.exporter.dashboards);
  const found = chosen === null ? undefined : row();
  if (found) {
    url.searchParams.set("var-engine", found.engine);
    url.searchParams.set("var-model_name", found.model);
  }
  if (link.href !== url.href) link.href = url.href;
}

/** Show whether the numbers are of now: those that are not are grey, with their age. */
function showState() {
  const since = live ? `; last answer ${age((performance.now() - answeredAt) / 1000)} ago, at ${clock(live.time)}` : "";
  const isLost = failure !== null;
  setText(byId("connection"), isLost ? `disconnected${since}` : live ? `${isPolling() ? "live" : "paused"} ${clock(live.time)}` : "connecting");
  setClass(byId("connection"), isLost ? "lost" : "");
  document.body.classList.toggle("lost", isLost);
  byId("icon").href = isLost ? "ui/icon-grey.svg" : "ui/icon.svg";
  document.title = `sidestep: ${isLost ? failure + since : live?.verdict.text ?? "connecting"}`;
}

function fail(text) {
  failure = text;
  showLive();
  if (!live) {
    showVerdict({ level: "unknown", text }, [], new Map());
    document.body.classList.remove("loading");
  }
}

poll(
  () => "api/v1/live",
  LIVE_INTERVAL,
  answer => {
    live = answer;
    answeredAt = performance.now();
    failure = null;
    showLive();
  },
  error => {
    if (error instanceof Refused && [401, 403].includes(error.status)) fail("the exporter denies access: reload the page and log in");
  },
);
setInterval(() => {
  if (!isPolling()) return;
  if (failure !== null) showState();
  else if (performance.now() - answeredAt > STALE) fail("the exporter does not answer");
}, LIVE_INTERVAL);
poll(() => "api/v1/doctor", DOCTOR_INTERVAL, answer => showFindings(answer.findings));
const histories = poll(
  () => query("api/v1/live/history?") ?? "api/v1/live/history",
  HISTORY_INTERVAL,
  answer => {
    history = answer;
    showLive();
  },
  error => {
    // The exporter has forgotten the engine.
    if (error instanceof Refused && error.status === 404 && chosen !== null) chooseNone();
  },
);
const curves = poll(() => query("api/v1/kv/curve?"), CURVE_INTERVAL, answer => curve.show(answer.engines[0] ?? null), () => curve.show(null));
const requests = poll(
  () => (HAS_TIMELINES ? query(`api/v1/timeline?slowest=${SLOWEST}&`) : null),
  REQUESTS_INTERVAL,
  answer => showRequests(answer.engines[0]?.requests ?? []),
  () => showRequests([]),
);

loadCauses();
choose();
addEventListener("hashchange", choose);
byId("all").addEventListener("click", chooseNone);
byId("attention").addEventListener("click", event => {
  if (event.target.closest("a")) byId("details").scrollIntoView({ block: "nearest" });
});
byId("pause").addEventListener("click", () => {
  const isPaused = byId("pause").getAttribute("aria-pressed") === "false";
  byId("pause").setAttribute("aria-pressed", isPaused);
  setText(byId("pause"), isPaused ? "Go on" : "Pause");
  answeredAt = performance.now();
  pause(isPaused);
  showState();
});
document.addEventListener("visibilitychange", () => { answeredAt = performance.now(); });
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && chosen !== null) chooseNone();
});
