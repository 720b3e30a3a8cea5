// The numbers of all engines as one, the exporter's own, and what to do without engines.

import { byId, make, onChange, setFacts, setText } from "./elements.js";
import { UNKNOWN, age, bytes, clock, count, seconds, share } from "./format.js";

export function showTiles(total) {
  setFacts(byId("tiles"), [
    ["Running", count(total.running)],
    ["Waiting", count(total.waiting)],
    ["Highest load", share(total.saturation)],
    ["Tokens/s in", count(total.prompt_tokens_per_second)],
    ["Tokens/s out", count(total.generation_tokens_per_second)],
    ["TTFT p95", seconds(total.ttft?.p95)],
    ["ITL p95", seconds(total.inter_token?.p95)],
    ["E2E p95", seconds(total.e2e?.p95)],
    ["Mean KV cache", share(total.kv_cache_usage)],
    ["Prefix hits", share(total.prefix_hit_rate)],
  ]);
}

export function showExporter(live) {
  const { exporter } = live;
  const scraped = exporter.last_scrape === null ? "never scraped" : `scraped ${age(exporter.last_scrape)} ago`;
  setText(byId("scraped"), scraped);
  const engines = live.engines.length;
  setText(byId("engine-count"), `${count(engines)} engine${engines === 1 ? "" : "s"}`);
  const memory = exporter.resident_bytes ? bytes(exporter.resident_bytes) : UNKNOWN;
  const lost = exporter.lost ? `, ${count(exporter.lost)} items lost` : "";
  setText(byId("exporter-line"), `version ${live.version}, up for ${age(exporter.uptime)}, ${memory}${lost}`);
  setFacts(byId("exporter"), [
    ["Ingest endpoints", exporter.endpoints.join(", ") || "none"],
    ["Connected streams", count(exporter.streams)],
    ["Items applied per second", count(exporter.items_per_second)],
    ["Items lost", count(exporter.lost)],
    ["Exposed series", count(exporter.series)],
    ["Event loop delay", seconds(exporter.loop_lag)],
  ]);
}

export const showWarnings = onChange(warnings => {
  const lines = warnings.map(({ time, text }) => make("li", {}, make("time", {}, clock(time)), ` ${text}`));
  byId("warnings").replaceChildren(...(lines.length ? lines : [make("li", {}, "none")]));
});

/** Show what the exporter's own checks have found, but for what is only worth knowing. */
export const showFindings = onChange(findings => {
  const grave = findings.filter(({ severity }) => severity !== "info");
  const lines = grave.map(({ code, severity, subject, text, remedy }) =>
    make("li", {}, make("strong", {}, `${code} ${severity}`), ` ${subject}: ${text}. ${remedy}`),
  );
  byId("findings").replaceChildren(...lines);
  byId("doctor").hidden = !lines.length;
  byId("checks").hidden = !lines.length;
  setText(byId("checks"), `${lines.length} finding${lines.length === 1 ? "" : "s"} of the exporter's checks`);
});

/** Show the commands that connect an engine to these endpoints. */
export const showCommands = onChange(endpoints => {
  const commands = endpoints.flatMap(listened => {
    // An address that listens on all interfaces is reached by the name in the browser's address.
    const endpoint = listened.replace(/^tcp:\/\/(?:0\.0\.0\.0|\*|\[::\])(?=:)/, `tcp://${location.hostname}`);
    return [
      `SIDESTEP_ENDPOINT=${endpoint} vllm serve MODEL`,
      `SIDESTEP_ENDPOINT=${endpoint} python -m sglang.launch_server --enable-metrics --model-path MODEL`,
    ];
  });
  byId("commands").replaceChildren(...commands.map(command));
});

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
