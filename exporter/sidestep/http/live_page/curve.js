// The hit-ratio curve of an engine's prefix cache, with bounds, drawn by uPlot.

import { byId, colour, make, onTheme, setFacts, setText } from "./elements.js";
import { bytes, count, share } from "./format.js";

const HEIGHT = 300;

const multiple = capacity => `${Number(capacity.toPrecision(2))}x`;

/** Return the numbers beside the curve. */
function facts(engine) {
  const all = [
    ["Found now", share(engine.hit_ratio)],
    ["Size now", `${count(engine.capacity_blocks)} blocks`],
    ["Used in a half-life", `${count(engine.working_set_blocks)} blocks`],
    ["Within one point of the best", `${count(engine.sufficient_blocks)} blocks`],
    ["One more GiB adds", share(engine.hit_ratio_per_gib)],
    ["Shared by all engines of the model", share(engine.shared_hit_ratio)],
  ];
  return all.filter(([, text]) => !text.startsWith(share(null)));
}

function table(curve) {
  const titles = ["Size", "Blocks", "Memory of a device", "Found", "Sampling error"];
  const head = make("tr", {}, ...titles.map(title => make("th", { scope: "col" }, title)));
  const rows = curve.map(point => make("tr", {}, ...[
    multiple(point.capacity), count(point.blocks), point.bytes ? bytes(point.bytes) : share(null), share(point.hit_ratio),
    `${share(point.low)} to ${share(point.high)}`,
  ].map(text => make("td", {}, text))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

export class Curve {
  constructor() {
    this.box = byId("curve-plot");
    this.plot = null;
    this.engine = null;
    new ResizeObserver(() => this.draw()).observe(this.box);
    onTheme(() => this.draw());
  }

  /** Show the curve of an engine; nothing of one that has none. */
  show(engine) {
    this.engine = engine?.curve.length ? engine : null;
    byId("curve").hidden = this.engine === null;
    if (this.engine === null) return;
    setFacts(byId("curve-facts"), facts(this.engine));
    byId("curve-table").replaceChildren(table(this.engine.curve));
    this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (this.engine === null || !this.box.clientWidth) return;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, font: "12px system-ui" };
    const line = colour("--series-1");
    const bound = { stroke: "transparent", points: { show: false } };
    const options = {
      width: this.box.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false, drag: { x: false } },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: [0, 1] } },
      axes: [
        { ...axis, label: "Size of the cache, 1x is the present one", values: (_, sizes) => sizes.map(size => (size === null ? "" : multiple(size))) },
        { ...axis, size: 56, label: "Share of prompt tokens found", values: (_, ratios) => ratios.map(share) },
        { ...axis, side: 0, grid: { show: false }, label: "Blocks", values: (_, sizes) => sizes.map(size => this.blocks(size)) },
      ],
      series: [{}, bound, bound, { stroke: line, width: 2, points: { show: false } }],
      bands: [{ series: [2, 1], fill: colour("--band") }],
      hooks: { draw: [plot => this.markSizeNow(plot)], setCursor: [plot => this.read(plot.cursor.idx)] },
    };
    const column = name => this.engine.curve.map(point => point[name]);
    this.plot = new uPlot(options, [column("capacity"), column("low"), column("high"), column("hit_ratio")], this.box);
  }

  blocks(size) {
    const whole = this.engine.capacity_blocks;
    return size === null || !whole ? "" : count(Math.round(size * whole));
  }

  /** Show the point under the cursor. */
  read(index) {
    const point = this.engine.curve[index];
    setText(byId("curve-readout"), point ? `${multiple(point.capacity)}, ${count(point.blocks)} blocks: ${share(point.hit_ratio)}, ${share(point.low)} to ${share(point.high)} with its sampling error` : "");
  }

  markSizeNow({ ctx, bbox, valToPos }) {
    const left = valToPos(1, "x", true);
    ctx.save();
    ctx.strokeStyle = colour("--soft");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }
}
