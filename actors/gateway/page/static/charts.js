// Line charts of the last two minutes, by uPlot (vendor/, a script of its own).

import { color, onScheme } from "./dom.js";

const { uPlot } = window;

const NUM_POINTS = 120;
const HEIGHT = 110;

export class LineChart {
  // `series`: [{label, color, fill}], with names of colours in style.css. `max`: the fixed end of the axis.
  constructor(element, series, { max = null, unit = "" } = {}) {
    this.element = element;
    this.series = series;
    this.max = max;
    this.unit = unit;
    this.data = [[], ...series.map(() => [])];
    onScheme(() => this.make());
    new ResizeObserver(() => this.fit()).observe(element);
    this.make();
  }

  add(values) {
    this.data[0].push(Date.now() / 1000);
    values.forEach((value, index) => this.data[index + 1].push(value));
    if (this.data[0].length > NUM_POINTS) this.data.forEach((column) => column.shift());
    this.plot.setData(this.data);
  }

  make() {
    this.plot?.destroy();
    const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot(
      {
        width: Math.max(120, this.element.clientWidth),
        height: HEIGHT,
        cursor: { show: false },
        legend: { show: false },
        padding: [8, 20, 0, 0],
        scales: { x: { range: () => [Date.now() / 1000 - NUM_POINTS, Date.now() / 1000] }, y: { range: (_, low, high) => this.range(high) } },
        axes: [
          { ...axis, size: 22, space: 70, values: (_, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString("en-GB")) },
          { ...axis, size: 44, space: 28, values: (_, ticks) => ticks.map((value) => `${value}${this.unit}`) },
        ],
        series: [{}, ...this.series.map((one) => this.style(one))],
      },
      this.data,
      this.element,
    );
  }

  style({ label, color: name, fill }) {
    const stroke = color(name);
    return { label, stroke, width: 1.6, points: { show: false }, fill: fill ? `${stroke}22` : undefined };
  }

  range(high) {
    return [0, this.max ?? Math.max(10, high * 1.15 || 10)];
  }

  fit() {
    const width = Math.max(120, this.element.clientWidth);
    if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }
}
