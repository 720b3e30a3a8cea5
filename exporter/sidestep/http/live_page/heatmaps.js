// Observations of histograms over time: the more in a bucket, the stronger its colour.

import { LEFT, RIGHT, SPAN, follow, moveCursor } from "./cursor.js";
import { byId, colour, make, onTheme, setText } from "./elements.js";
import { clock, count, tick } from "./format.js";

const INTERVAL = 5;
const TITLES = {
  ttft: "TTFT", inter_token: "ITL", e2e: "E2E",
  kv_lifetime: "Lifetime of KV blocks", kv_idle: "Idle time of KV blocks before eviction", kv_reuse_gap: "Time between uses of KV blocks",
};

/** Return the text of a bucket. */
function bucket(bounds, index) {
  if (index === bounds.length) return `over ${tick(bounds.at(-1))}`;
  return index ? `${tick(bounds[index - 1])} to ${tick(bounds[index])}` : `up to ${tick(bounds[0])}`;
}

const opacity = (number, most) => 0.15 + 0.85 * (Math.log1p(number) / Math.log1p(most));

export class HeatMap {
  constructor(name) {
    this.name = name;
    this.title = TITLES[name] ?? name;
    this.canvas = make("canvas", { class: "heat", role: "img" });
    this.readout = make("span");
    this.most = make("span");
    this.scale = make("span", { class: "scale" }, "1 ", make("span", { class: "ramp" }), " ", this.most);
    this.rows = make("tbody");
    const head = make("tr", {}, make("th", { scope: "col" }, "Bucket"), make("th", { scope: "col" }, "Observations"));
    this.table = make("details", {}, make("summary", {}, "Sums as a table"), make("table", {}, make("thead", {}, head), this.rows));
    this.element = make("div", { class: "heatmap" }, this.canvas, make("p", { class: "readout" }, this.readout, this.scale), this.table);
    this.cursor = null;
    this.times = [];
    this.bounds = [];
    this.counts = [];
    this.sums = [];
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", () => {
      this.summarize();
      moveCursor(null);
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    follow(time => {
      this.cursor = time;
      this.draw();
    });
  }

  /** Show counts for each interval until `now`; undefined: there are none. */
  show(times, found, now) {
    const { bounds, counts } = found ?? { bounds: [], counts: [] };
    this.times = times;
    this.now = now;
    this.bounds = bounds;
    this.counts = counts;
    const sums = bounds.length ? [...bounds, null].map((_, index) => counts.reduce((sum, column) => sum + (column[index] ?? 0), 0)) : [];
    const used = sums.flatMap((sum, index) => (sum ? [index] : []));
    // Only buckets around observations are drawn: others would make them unreadable.
    this.low = Math.max((used[0] ?? 0) - 1, 0);
    this.high = Math.min((used.at(-1) ?? bounds.length) + 1, bounds.length);
    this.sums = sums;
    this.rows.replaceChildren(...used.map(index => make("tr", {}, make("td", { class: "text" }, bucket(bounds, index)), make("td", {}, count(sums[index])))));
    setText(this.most, `${count(Math.max(1, ...counts.flat()))} in ${INTERVAL} s`);
    this.scale.hidden = this.table.hidden = !used.length;
    if (this.cursor === null) this.summarize();
    this.draw();
  }

  summarize() {
    const total = this.sums.reduce((sum, each) => sum + each, 0);
    const most = this.sums.indexOf(Math.max(...this.sums));
    const text = total ? `${count(total)} observations, most of them ${bucket(this.bounds, most)}` : "no observations";
    setText(this.readout, text);
    this.canvas.setAttribute("aria-label", `${this.title}: ${text}`);
  }

  /** Return the place of a time on the axis, which is that of the chart above. */
  place(time) {
    const width = this.canvas.clientWidth - LEFT - RIGHT;
    return LEFT + Math.max(0, width * (1 - (this.now - time) / SPAN));
  }

  point(event) {
    const width = this.canvas.clientWidth - LEFT - RIGHT;
    const time = this.now - SPAN * (1 - (event.offsetX - LEFT) / width);
    moveCursor(time < this.now - SPAN || time > this.now ? null : time);
    const column = this.times.findIndex(end => end >= time && end - INTERVAL * 1.5 < time);
    const rows = this.high - this.low + 1;
    const index = this.high - Math.floor((event.offsetY / this.canvas.clientHeight) * rows);
    const found = this.counts[column]?.[index];
    if (found !== undefined) setText(this.readout, `${clock(this.times[column])}, ${bucket(this.bounds, index)}: ${count(found)}`);
  }

  draw() {
    const scale = devicePixelRatio || 1;
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width || this.now === undefined) return;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.strokeStyle = colour("--line");
    pen.strokeRect(LEFT + 0.5, 0.5, width - LEFT - RIGHT - 1, height - 1);
    this.drawCounts(pen, height);
    if (this.cursor !== null) {
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--soft");
      pen.fillRect(Math.round(this.place(this.cursor)), 0, 1, height);
    }
  }

  drawCounts(pen, height) {
    const row = height / (this.high - this.low + 1);
    const every = Math.ceil(14 / row);
    const most = Math.max(1, ...this.counts.flat());
    pen.fillStyle = colour("--heat");
    this.counts.forEach((column, x) => {
      const before = this.times[x - 1] ?? 0;
      const start = this.times[x] - before > 2.5 * INTERVAL ? this.times[x] - INTERVAL : before;
      const [left, right] = [start, this.times[x]].map(time => Math.round(this.place(time)));
      for (let index = this.low; index <= this.high; index++) {
        if (!column[index]) continue;
        pen.globalAlpha = opacity(column[index], most);
        const [top, bottom] = [this.high - index, this.high - index + 1].map(each => Math.round(each * row));
        pen.fillRect(left, top, right - left, bottom - top);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--soft");
    pen.font = "12px system-ui";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let index = this.low; index <= this.high && this.bounds.length; index += every) {
      const text = index === this.bounds.length ? `> ${tick(this.bounds.at(-1))}` : `≤ ${tick(this.bounds[index])}`;
      pen.fillText(text, LEFT - 6, Math.min(Math.max((this.high - index + 0.5) * row, 7), height - 7));
    }
  }
}

/** The heat maps that stand below no chart: of KV blocks. */
export class HeatMaps {
  constructor() {
    this.maps = new Map();
    onTheme(() => this.maps.forEach(({ map }) => map.draw()));
  }

  show({ times, heatmaps }, now) {
    const shown = heatmaps.filter(each => each.name.startsWith("kv_") && each.counts.some(column => column.some(Boolean)));
    const names = new Set(shown.map(each => each.name));
    for (const [name, { figure }] of this.maps) {
      if (names.has(name)) continue;
      figure.remove();
      this.maps.delete(name);
    }
    for (const each of shown) {
      if (!this.maps.has(each.name)) {
        const map = new HeatMap(each.name);
        const figure = make("figure", {}, make("figcaption", {}, map.title), map.element);
        this.maps.set(each.name, { map, figure });
        byId("heatmaps").append(figure);
      }
      this.maps.get(each.name).map.show(times, each, now);
    }
  }
}
