// A run over its steps: metrics, bytes, and the time that saves cost.

import { state } from "./app.js";
import { bytes, h, meter, number, problem, put, seconds, work } from "./dom.js";
import { chart } from "./chart.js";

const METRICS_MAX = 8;

export function runView({ store, parameters }) {
  let isOpen = true, drawn = "";
  const pick = h("select", { "aria-label": "Run" }), charts = h("div", { class: "charts" }), costs = h("div", { class: "charts" });
  const title = h("div", { class: "title" }, h("h1", {}, "Run"), pick);
  const runOf = (row) => row.path.split("/").slice(0, -1).join("/");
  let run = parameters.get("run"), timed = null;
  const rowsOf = () => [...(state.rows.get(store)?.values() ?? [])].filter((row) => runOf(row) === run && row.step !== null && row.state === "complete").sort((a, b) => a.step - b.step);

  const update = () => {
    const rows = [...(state.rows.get(store)?.values() ?? [])], runs = [...new Set(rows.map(runOf))].sort();
    const list = state.lists.get(store);
    if (!rows.length) {
      put(charts, [list && list.at !== null && list.looked === list.found ? h("p", { class: "card empty" }, "No checkpoint is here yet.") : meter("Reading the list …")]);
      return;
    }
    if (!runs.includes(run)) run = runOf(rows.reduce((a, b) => (a.created > b.created ? a : b)));
    if ([...pick.options].map((one) => one.value).join("\n") !== runs.join("\n")) put(pick, runs.map((name) => h("option", { value: name }, name || "/")));
    pick.value = run;
    pick.hidden = runs.length < 2;
    const steps = rowsOf();
    const key = JSON.stringify([run, steps.map((row) => [row.step, row.stored, row.created])]);
    if (key === drawn) return;
    drawn = key;
    put(charts, draw(steps));
    if (timed !== run) {
      timed = run;
      loadTimes();
    }
  };
  const loadTimes = () => {
    put(costs, [meter("Reading how long saves took …")]);
    work("/api/times.json", { store, path: run || undefined }, ({ done, total }) => put(costs, [meter(`Reading how long saves took: ${done} of ${total}`)]), () => isOpen)
      .then((found) => { if (found) put(costs, drawTimes(found)); })
      .catch((error) => { if (isOpen) put(costs, [problem(error)]); });
  };
  pick.addEventListener("change", () => { run = pick.value; update(); });
  state.listeners.add((what, number) => { if (what === "rows" && number === store) update(); });
  update();
  return { element: h("div", {}, title, charts, costs), title: "Run", close: () => { isOpen = false; } };
}

const line = (colour, label, more = {}) => ({ label, colour, ...more });

function draw(rows) {
  if (rows.length < 2) return h("p", { class: "card empty" }, "Charts need two complete checkpoints of a run.");
  const xs = rows.map((row) => row.step), names = [...new Set(rows.flatMap((row) => Object.keys(row.metrics)))].sort((a, b) => b.includes("loss") - a.includes("loss") || (a < b ? -1 : 1));
  const metrics = names.slice(0, METRICS_MAX).map((name) => chart({
    title: name, note: "recorded with each checkpoint", data: [xs, rows.map((row) => (Number.isFinite(row.metrics[name]) ? row.metrics[name] : null))], series: [line("--accent", name)] }).box);
  const fresh = rows.some((row) => row.new !== null && row.new !== undefined);
  return [
    ...metrics,
    fresh ? chart({ title: "New bytes", note: "stored first by this step", data: [xs, rows.map((row) => row.new)], format: bytes, least: 1, series: [line("--accent", "new", { bars: true })] }).box : null,
    chart({ title: "Size", note: "and what is stored of it", data: [xs, rows.map((row) => row.size), rows.map((row) => row.stored)], format: bytes, least: 1, series: [line("--muted", "size"), line("--accent", "stored")] }).box,
    names.length > METRICS_MAX ? h("p", { class: "muted" }, `${names.length - METRICS_MAX} more metrics are not drawn.`) : null,
  ];
}

function drawTimes(found) {
  const times = found.times.filter((one) => one.step !== null).sort((a, b) => a.step - b.step);
  if (times.length < 2) return h("p", { class: "muted" }, "Saves of `tierfs.train.Manager` record how long they blocked training. Here are none yet.");
  return [chart({ title: "Time blocked per save", note: `median ${seconds(found.median_blocked_s)}`, format: seconds, least: 0.001,
    data: [times.map((one) => one.step), times.map((one) => one.blocked_s)], series: [line("--accent", "blocked")] }).box,
  chart({ title: "Time until a save was done", note: "in the background", format: seconds, least: 0.001, data: [times.map((one) => one.step), times.map((one) => one.save_s)], series: [line("--muted", "save")] }).box];
}
