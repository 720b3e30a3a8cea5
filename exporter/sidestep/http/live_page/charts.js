// Lines over the last ten minutes, drawn by uPlot.

import { byId, colour, make, setText } from "./elements.js";
import { clock, count, seconds, share } from "./format.js";

const HEIGHT = 170;
const CHARTS = [
  { title: "Requests", text: count, lines: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Tokens per second", text: count, lines: [["prompt_tokens_per_second", "prompt"], ["generation_tokens_per_second", "generated"]] },
  { title: "TTFT", text: seconds, lines: [["ttft_p50", "p50"], ["ttft_p95", "p95"], ["ttft_p99", "p99"]] },
  { title: "ITL", text: seconds, lines: [["inter_token_p50", "p50"], ["inter_token_p95", "p95"], ["inter_token_p99", "p99"]] },
  { title: "Request duration", text: seconds, lines: [["e2e_p50", "p50"], ["e2e_p95", "p95"], ["e2e_p99", "p99"]] },
  { title: "KV cache usage, prefix cache hits", text: share, lines: [["kv_cache_usage", "KV cache"], ["prefix_hit_rate", "prefix hits"]] },
];
const DASHES = [[], [8, 4], [2, 4]];

/** Return the newest number of a line: of now, where a row has it. */
function newest(row, name) {
  const [, base, part] = /^(.*?)(?:_(p\d+))?$/.exec(name);
  // Rates of a row are of the last minute, those of the lines of five seconds.
  if (/per_second$|rate$/.test(name)) return undefined;
  return part ? row[base]?.[part] ?? null : row[base];
}

class Chart {
  constructor({ title, text, lines }) {
    this.text = text;
    this.lines = lines;
    this.legend = make("ul", { class: "legend" });
    this.box = make("div", { class: "plot" });
    this.values = lines.map(([, label], index) => {
      const value = make("span");
      this.legend.append(make("li", {}, make("span", { class: `mark line-${index + 1}` }), `${label} `, value));
      return value;
    });
    this.figure = make("figure", {}, make("figcaption", {}, title), this.legend, this.box);
    byId("charts").append(this.figure);
    this.plot = null;
    this.data = [[], ...lines.map(() => [])];
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  draw() {
    this.plot?.destroy();
    const axis = {
      stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") },
      font: "12px system-ui",
    };
    const options = {
      width: this.box.clientWidth || 300, height: HEIGHT, legend: { show: false }, cursor: { y: false },
      scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, space: 80, values: (_, times) => times.map(clock) },
        { ...axis, size: 68, values: (_, numbers) => numbers.map(this.text) },
      ],
      series: [{}, ...this.lines.map((_, index) => ({
        stroke: colour(`--series-${index + 1}`), width: 2, dash: DASHES[index], points: { show: false },
      }))],
      hooks: { setCursor: [() => this.showValues()] },
    };
    this.plot = new uPlot(options, this.data, this.box);
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  show(history, row, time) {
    const times = [...history.times];
    const columns = this.lines.map(([name]) => [...(history.series[name] ?? times.map(() => null))]);
    if (row && (!times.length || time > times.at(-1))) {
      times.push(time);
      this.lines.forEach(([name], index) => columns[index].push(newest(row, name) ?? null));
    }
    this.data = [times, ...columns];
    if (this.plot) this.plot.setData(this.data);
    else this.draw();
    this.showValues();
  }

  /** Show the numbers under the cursor, or the newest. */
  showValues() {
    const index = this.plot?.cursor.idx;
    this.values.forEach((element, line) => {
      const column = this.data[line + 1];
      const value = index === null || index === undefined ? column.findLast(each => each !== null) : column[index];
      setText(element, this.text(value));
    });
  }
}

export class Charts {
  constructor() {
    this.charts = CHARTS.map(each => new Chart(each));
    // uPlot takes colours when it is made.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach(chart => chart.draw()));
  }

  /** @param row The numbers of the same engines now, at `time`. */
  show(history, row, time) {
    for (const chart of this.charts) chart.show(history, row, time);
  }
}
