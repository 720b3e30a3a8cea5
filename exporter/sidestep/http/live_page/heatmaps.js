// Observations of histograms over time: the more in a bucket, the stronger its colour.

import { byId, colour, make, setText } from "./elements.js";
import { clock, count, seconds } from "./format.js";

const MARGIN = 68;
const TITLES = {
  ttft: "TTFT", inter_token: "ITL", e2e: "Request duration",
  kv_lifetime: "Lifetime of KV blocks", kv_idle: "Idle time of KV blocks before eviction", kv_reuse_gap: "Time between uses of KV blocks",
};

/** Return the text of a bucket. */
function bucket(bounds, index) {
  if (index === bounds.length) return `over ${seconds(bounds.at(-1))}`;
  return index ? `${seconds(bounds[index - 1])} to ${seconds(bounds[index])}` : `up to ${seconds(bounds[0])}`;
}

class HeatMap {
  constructor(name) {
    this.canvas = make("canvas", { class: "heat", role: "img" });
    this.readout = make("p", { class: "readout" });
    this.rows = make("tbody");
    const head = make("tr", {}, make("th", { scope: "col" }, "Bucket"), make("th", { scope: "col" }, "Observations"));
    const table = make("table", {}, make("thead", {}, head), this.rows);
    this.figure = make(
      "figure", {}, make("figcaption", {}, TITLES[name] ?? name), this.canvas, this.readout,
      make("details", {}, make("summary", {}, "Sums as a table"), table),
    );
    this.title = TITLES[name] ?? name;
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.summarize());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(times, { bounds, counts }) {
    this.times = times;
    this.bounds = bounds;
    this.counts = counts;
    const sums = [...bounds, null].map((_, index) => counts.reduce((sum, column) => sum + (column[index] ?? 0), 0));
    const used = sums.flatMap((sum, index) => (sum ? [index] : []));
    // Only buckets around observations are drawn: others would make them unreadable.
    this.low = Math.max((used[0] ?? 0) - 1, 0);
    this.high = Math.min((used.at(-1) ?? bounds.length) + 1, bounds.length);
    this.sums = sums;
    this.rows.replaceChildren(...used.map(index => make("tr", {}, make("td", { class: "text" }, bucket(bounds, index)), make("td", {}, count(sums[index])))));
    this.summarize();
    this.draw();
  }

  summarize() {
    const total = this.sums.reduce((sum, each) => sum + each, 0);
    const most = this.sums.indexOf(Math.max(...this.sums));
    const text = total ? `${count(total)} observations, most of them ${bucket(this.bounds, most)}` : "no observations";
    setText(this.readout, text);
    this.canvas.setAttribute("aria-label", `${this.title}: ${text}`);
  }

  point(event) {
    const width = this.canvas.clientWidth - MARGIN;
    const column = Math.floor(((event.offsetX - MARGIN) / width) * this.times.length);
    const rows = this.high - this.low + 1;
    const index = this.high - Math.floor((event.offsetY / this.canvas.clientHeight) * rows);
    const found = this.counts[column]?.[index];
    if (found !== undefined) setText(this.readout, `${clock(this.times[column])}, ${bucket(this.bounds, index)}: ${count(found)}`);
  }

  draw() {
    if (!this.counts) return;
    const scale = devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const [columns, rows] = [this.counts.length, this.high - this.low + 1];
    const row = height / rows;
    const every = Math.ceil(14 / row);
    const most = Math.max(1, ...this.counts.flat());
    pen.fillStyle = colour("--heat");
    this.counts.forEach((column, x) => {
      for (let index = this.low; index <= this.high; index++) {
        if (!column[index]) continue;
        pen.globalAlpha = 0.15 + 0.85 * (Math.log1p(column[index]) / Math.log1p(most));
        const [left, right] = [x, x + 1].map(each => Math.round(MARGIN + (each * (width - MARGIN)) / columns));
        const [top, bottom] = [this.high - index, this.high - index + 1].map(each => Math.round(each * row));
        pen.fillRect(left, top, right - left, bottom - top);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--soft");
    pen.font = "12px system-ui";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let index = this.low; index <= this.high; index += every) {
      const text = index === this.bounds.length ? `> ${seconds(this.bounds.at(-1))}` : `≤ ${seconds(this.bounds[index])}`;
      pen.fillText(text, MARGIN - 6, Math.min(Math.max((this.high - index + 0.5) * row, 7), height - 7));
    }
  }
}

export class HeatMaps {
  constructor() {
    this.maps = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.maps.forEach(map => map.draw()));
  }

  show({ times, heatmaps }) {
    const names = new Set(heatmaps.map(each => each.name));
    for (const [name, map] of this.maps) {
      if (names.has(name)) continue;
      map.figure.remove();
      this.maps.delete(name);
    }
    for (const each of heatmaps) {
      if (!this.maps.has(each.name)) {
        this.maps.set(each.name, new HeatMap(each.name));
        byId("heatmaps").append(this.maps.get(each.name).figure);
      }
      this.maps.get(each.name).show(times, each);
    }
  }
}
