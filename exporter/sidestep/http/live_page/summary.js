// The verdict, the numbers of all engines as one, the exporter's own, and what to do without engines.

import { byId, make, setClass, setFacts, setText } from "./elements.js";
import { UNKNOWN, bytes, clock, count, seconds, share } from "./format.js";

export function showVerdict(verdict) {
  setText(byId("verdict"), `${{ ok: "✓", warning: "▲", critical: "✕", unknown: "?" }[verdict.level]} ${verdict.text}`);
  setClass(byId("verdict"), verdict.level);
}

export function showTiles(total) {
  setFacts(byId("tiles"), [
    ["Running", count(total.running)],
    ["Waiting", count(total.waiting)],
    ["Prompt tokens/s", count(total.prompt_tokens_per_second)],
    ["Generated tokens/s", count(total.generation_tokens_per_second)],
    ["TTFT p95", seconds(total.ttft?.p95)],
    ["ITL p95", seconds(total.inter_token?.p95)],
    ["KV cache usage", share(total.kv_cache_usage)],
    ["Prefix cache hits", share(total.prefix_hit_rate)],
  ]);
}

export function showExporter(live) {
  const { exporter } = live;
  setFacts(byId("exporter"), [
    ["Version", live.version],
    ["Up for", seconds(exporter.uptime)],
    ["Ingest endpoints", exporter.endpoints.join(", ") || "none"],
    ["Connected streams", count(exporter.streams)],
    ["Items applied per second", count(exporter.items_per_second)],
    ["Items that senders dropped", count(exporter.lost)],
    ["Exposed series", count(exporter.series)],
    ["Last scrape by Prometheus", exporter.last_scrape === null ? "never" : `${seconds(exporter.last_scrape)} ago`],
    ["Event loop delay", seconds(exporter.loop_lag)],
    ["Resident memory", exporter.resident_bytes ? bytes(exporter.resident_bytes) : UNKNOWN],
  ]);
}

let shownWarnings = "[]";

export function showWarnings(warnings) {
  const key = JSON.stringify(warnings);
  if (key === shownWarnings) return;
  shownWarnings = key;
  const lines = warnings.map(({ time, text }) => make("li", {}, make("time", {}, clock(time)), ` ${text}`));
  byId("warnings").replaceChildren(...(lines.length ? lines : [make("li", {}, "none")]));
}

let shownFindings = "[]";

/** Show what the exporter's own checks have found, but for what is only worth knowing. */
export function showFindings(findings) {
  const key = JSON.stringify(findings);
  if (key === shownFindings) return;
  shownFindings = key;
  const grave = findings.filter(({ severity }) => severity !== "info");
  const lines = grave.map(({ code, severity, subject, text, remedy }) =>
    make("li", {}, make("strong", {}, `${code} ${severity}`), ` ${subject}: ${text}. ${remedy}`),
  );
  byId("findings").replaceChildren(...lines);
  byId("doctor").hidden = !lines.length;
}

let shownEndpoints = "";

/** Show the commands that connect an engine to these endpoints. */
export function showCommands(endpoints) {
  if (shownEndpoints === endpoints.join()) return;
  shownEndpoints = endpoints.join();
  const commands = endpoints.flatMap(listened => {
    // An address that listens on all interfaces is reached by the name in the browser's address.
    const endpoint = listened.replace(/^tcp:\/\/(?:0\.0\.0\.0|\*|\[::\])(?=:)/, `tcp://${location.hostname}`);
    return [
      `SIDESTEP_ENDPOINT=${endpoint} vllm serve MODEL`,
      `SIDESTEP_ENDPOINT=${endpoint} python -m sglang.launch_server --enable-metrics --model-path MODEL`,
    ];
  });
  byId("commands").replaceChildren(...commands.map(command));
}

function command(text) {
  const button = make("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Browsers allow it on secure pages only.
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected";
    }
  });
  return make("li", {}, make("code", {}, text), " ", button);
}
