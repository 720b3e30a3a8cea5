// Lines over the last ten minutes, drawn by uPlot.

import { LEFT, RIGHT, SPAN, follow, moveCursor } from "./cursor.js";
import { byId, colour, make, onTheme, setText } from "./elements.js";
import { clock, count, seconds, share, tick } from "./format.js";
import { HeatMap } from "./heatmaps.js";

const HEIGHT = 150;
const INTERVAL = 5;
const CHARTS = [
  { title: "Requests", text: count, lines: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Tokens per second", text: count, lines: [["prompt_tokens_per_second", "prompt"], ["generation_tokens_per_second", "generated"]] },
  { title: "KV cache usage, prefix cache hits", text: share, lines: [["kv_cache_usage", "KV cache"], ["prefix_hit_rate", "prefix hits"]] },
  { title: "TTFT", heat: "ttft", text: seconds, lines: [["ttft_p50", "p50"], ["ttft_p95", "p95"], ["ttft_p99", "p99"]] },
  { title: "ITL", heat: "inter_token", text: seconds, lines: [["inter_token_p50", "p50"], ["inter_token_p95", "p95"], ["inter_token_p99", "p99"]] },
  { title: "E2E", heat: "e2e", text: seconds, lines: [["e2e_p50", "p50"], ["e2e_p95", "p95"], ["e2e_p99", "p99"]] },
];
const DASHES = [[], [8, 4], [2, 4]];

/** Return the newest number of a line: of now, where a row has it. */
function newest(row, name) {
  const [, base, part] = /^(.*?)(?:_(p\d+))?$/.exec(name);
  // Rates of a row are of the last minute, those of the lines of five seconds.
  if (/per_second$|rate$/.test(name)) return undefined;
  return part ? row[base]?.[part] ?? null : row[base];
}

/** Return times and columns with an empty sample wherever samples are missing, so that a gap is a gap. */
function withGaps(times, columns) {
  const allTimes = [];
  const all = columns.map(() => []);
  times.forEach((time, index) => {
    if (index && time - times[index - 1] > 2.5 * INTERVAL) {
      allTimes.push((time + times[index - 1]) / 2);
      for (const column of all) column.push(null);
    }
    allTimes.push(time);
    columns.forEach((column, line) => all[line].push(column[index]));
  });
  return [allTimes, ...all];
}

class Chart {
  constructor({ title, text, lines, heat }) {
    this.text = text;
    this.lines = lines;
    this.legend = make("ul", { class: "legend" });
    this.box = make("div", { class: "plot" });
    this.values = lines.map(([, label], index) => {
      const value = make("span");
      this.legend.append(make("li", {}, make("span", { class: `mark line-${index + 1}` }), `${label} `, value));
      return value;
    });
    this.time = make("time");
    this.figure = make("figure", {}, make("figcaption", {}, title, " ", this.time), this.legend, this.box);
    this.heat = heat ? new HeatMap(heat) : null;
    if (this.heat) this.figure.append(this.heat.element);
    byId("charts").append(this.figure);
    this.plot = null;
    this.now = 0;
    this.data = [[], ...lines.map(() => [])];
    new ResizeObserver(() => this.resize()).observe(this.box);
    follow(time => this.setCursor(time));
  }

  draw() {
    this.plot?.destroy();
    const axis = {
      stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") },
      font: "12px system-ui",
    };
    const options = {
      width: this.box.clientWidth || 300, height: HEIGHT, legend: { show: false }, padding: [8, RIGHT, 0, 0],
      cursor: { y: false, drag: { x: false } },
      scales: { x: { range: () => [this.now - SPAN, this.now] }, y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, space: 80, values: (_, times) => times.map(time => clock(time).slice(0, 5)) },
        { ...axis, size: LEFT, values: (_, numbers) => numbers.map(this.text === seconds ? tick : this.text) },
      ],
      series: [{}, ...this.lines.map((_, index) => ({
        stroke: colour(`--series-${index + 1}`), width: 2, dash: DASHES[index], points: { show: false },
      }))],
      hooks: { setCursor: [plot => moveCursor(plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x"))] },
    };
    this.plot = new uPlot(options, this.data, this.box);
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  setCursor(time) {
    if (!this.plot) return;
    const left = time === null ? -10 : this.plot.valToPos(time, "x");
    // Without its hook, which would move the others again.
    if (Math.abs(left - this.plot.cursor.left) > 0.5) this.plot.setCursor({ left, top: 10 }, false);
    this.showValues(time);
  }

  show(history, row, time) {
    const times = [...history.times];
    const columns = this.lines.map(([name]) => [...(history.series[name] ?? times.map(() => null))]);
    if (row && (!times.length || time > times.at(-1))) {
      times.push(time);
      this.lines.forEach(([name], index) => columns[index].push(newest(row, name) ?? null));
    }
    this.now = time;
    this.data = withGaps(times, columns);
    if (this.plot) this.plot.setData(this.data);
    else this.draw();
    const left = this.plot.cursor.left;
    this.showValues(left === undefined || left < 0 ? null : this.plot.posToVal(left, "x"));
    const found = this.heat && history.heatmaps.find(each => each.name === this.heat.name);
    if (this.heat) this.heat.show(history.times, found, time);
  }

  /** Show the numbers at a time, or the newest. */
  showValues(time) {
    const [times] = this.data;
    const index = time === null || !times.length ? null : this.plot.valToIdx(time);
    setText(this.time, index === null ? "now" : clock(times[index]));
    this.values.forEach((element, line) => {
      const column = this.data[line + 1];
      setText(element, this.text(index === null ? column.findLast(each => each !== null) : column[index]));
    });
  }
}

export class Charts {
  constructor() {
    this.charts = CHARTS.map(each => new Chart(each));
    onTheme(() => this.charts.forEach(chart => chart.plot && chart.draw()));
  }

  /** @param row The numbers of the same engines now, at `time`. */
  show(history, row, time) {
    for (const chart of this.charts) chart.show(history, row, time);
  }
}
