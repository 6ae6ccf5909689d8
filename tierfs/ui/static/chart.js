// Lines and bars by uPlot, in the colours of the page.

import { h, number } from "./dom.js";

const alive = new Set();
const POWERS = Array.from({ length: 64 }, (_, power) => 2 ** (power - 14));
const clock = (at) => new Date(at * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit" });
const paint = (name) => { // A canvas does not know light-dark(): let an element resolve it.
  const probe = h("i", { vars: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

// data: [xs, ys, ...]; series: [{label, colour, bars?, format?}]
// `least` is the least top of the y axis, which begins at 0 then; without it the axis fits the values.
export function chart({ title, note, data, series, window, least = null, format = number, height = 170 }) {
  const box = h("figure", { class: "card chart" }, h("figcaption", {}, h("strong", {}, title), note ? h("span", { class: "muted" }, ` ${note}`) : null));
  const place = h("div", { class: "plot", role: "img", "aria-label": `${title}: ${summary(data, series, format)}` });
  box.append(place);
  const draw = { box, place, data, plot: null };
  draw.make = () => {
    draw.plot?.destroy();
    const muted = paint("--muted"), line = paint("--line");
    const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    draw.plot = new uPlot({
      width: Math.max(200, place.clientWidth), height, padding: [8, 22, 0, 0], legend: { show: series.length > 1, live: false },
      cursor: { y: false },
      scales: { x: { time: false, range: window }, y: { range: (_, low, high) => (least === null ? uPlot.rangeNum(low, high, 0.1, true) : [0, Math.max(least, high * 1.08)]) } },
      axes: [{ ...axis, space: 70, size: 34, ...(window ? { values: (_, ticks) => ticks.map(clock), incrs: [60, 120, 300] } : {}) },
        { ...axis, size: 72, incrs: format === number ? undefined : POWERS, values: (_, ticks) => ticks.map(format) }],
      series: [{}, ...series.map((one) => ({
        label: one.label, stroke: paint(one.colour), width: 2, points: { show: data[0].length < 40 && !one.bars && !one.fill, size: 5 },
        fill: one.bars ? paint(one.colour) : one.fill ? paint("--wash") : undefined,
        paths: one.bars ? uPlot.paths.bars({ size: [0.7, 24] }) : undefined,
      }))],
    }, draw.data, place);
  };
  draw.set = (fresh) => {
    draw.data = fresh;
    draw.plot?.setData(fresh);
    place.setAttribute("aria-label", `${title}: ${summary(fresh, series, format)}`);
  };
  alive.add(draw);
  requestAnimationFrame(draw.make);
  return draw;
}

function summary(data, series, format) {
  return series.map((one, index) => {
    const known = data[index + 1].filter((value) => value !== null && value !== undefined);
    return known.length ? `${one.label} now ${format(known.at(-1))}, at most ${format(known.reduce((a, b) => Math.max(a, b)))}` : `${one.label} unknown`;
  }).join("; ");
}

function again() {
  for (const draw of alive) draw.box.isConnected ? draw.make() : (draw.plot?.destroy(), alive.delete(draw));
}

let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(again, 150); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
export { again as redraw };
